"""Training steps of TensorFlow's CUDA build, recorded on the stub driver, against what follows from the steps as
TensorFlow prepared them; and the rules of the executor one by one. Needs no TensorFlow, but for the last tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from graphmem import analyze
from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.recurrent import Network
from graphmem.devices import device_named
from graphmem.errors import SourceError
from graphmem.runtimes.tensorflow.dataflow import trace_of
from graphmem.runtimes.tensorflow.library import CudnnSpaces
from graphmem.runtimes.tensorflow.step import read_step
from graphmem.sources.hints import refuse_keras
from graphmem.trace import EventKind, Trace
from tests import places
from tests.recorded import tensorflow_steps as steps
from tests.support import ratchet

REACHED = places.GOLDEN / "tensorflow" / "steps_ratchet.json"
#: Models that are large; the others take a second together.
_SLOW = ("resnet50", "mobilenet")
_NAMES = [name for name in steps.recorded() if (steps.PREPARED / f"{steps.CASES[name].model}.json.gz").exists()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in _NAMES]
)
def test_a_recorded_step_gets_no_further_away(name: str, request: pytest.FixtureRequest) -> None:
    row = steps.recorded()[name]
    off = 100 * (steps.predicted(name)[-1] / steps.peak(row) - 1)
    if request.config.getoption("--update-goldens"):
        ratchet.write(REACHED, ratchet.read(REACHED) | {name: round(off, 2)})
        return
    assert abs(off) <= abs(ratchet.read(REACHED)[name]) + 0.01, "see python -m tests.recorded tensorflow_steps table"


def test_most_recorded_steps_are_within_two_per_cent() -> None:
    modelled = {name: off for name, off in ratchet.read(REACHED).items() if not steps.prepared(name)[0].jit}
    assert sum(abs(off) <= 2 for off in modelled.values()) >= 16


# --- rules ------------------------------------------------------------------------------------------------------------


class NoLibrary:
    def convolution(self, asked: Convolution) -> tuple[int, int]:
        raise AssertionError

    def recurrent(self, network: Network, training: bool) -> tuple[int, int]:
        raise AssertionError


def row(op: str, name: str, inputs: list[str], shape: list[int], **more: Any) -> dict[str, Any]:
    return {
        "op": op, "name": name, "device": "gpu", "inputs": inputs, "outputs": [["float32", shape]], "host": [[], []],
        "attributes": {}, **more,
    }  # fmt: skip


def document(nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "tensorflow": "2.21.0", "keras": "3.15.1", "training": True, "jit": False, "eager": False, "optimizer": [],
        "variables": [{"handle": 1, "name": "w", "trainable": True, "dtype": "float32", "shape": [64], "steps": []}],
        "captured": {"w": 1}, "data": [["float32", [64], "x"]], "nodes": nodes, **more,
    }  # fmt: skip


def made(trace: Trace, iteration: int = 1) -> list[tuple[str, int]]:
    """Operators of an iteration that requested something, and how much."""
    found = []
    for event in trace.events():
        operator = trace.operators[event.operator]
        if event.kind == EventKind.ALLOC and trace.phases[operator.phase].iteration == iteration:
            found.append((operator.module or operator.name, trace.storages[event.subject].bytes))
    return found


def follow(nodes: list[dict[str, Any]], **more: Any) -> list[tuple[str, int]]:
    return made(trace_of(read_step(document(nodes, **more)), "test", 2, NoLibrary()), 2)


def test_an_output_is_written_over_an_input_that_nobody_else_reads() -> None:
    read, first = row("ReadVariableOp", "read", ["w"], [64]), row("Mul", "a", ["x", "read"], [64])
    alone = follow([read, first, row("Relu", "b", ["a"], [64])])
    assert alone == [("batch", 256), ("a", 256)]
    twice = follow([read, first, row("Relu", "b", ["a"], [64]), row("Neg", "c", ["a"], [64])])
    assert twice == [("batch", 256), ("a", 256), ("b", 256)]  # the second reader is the last


def test_variables_are_updated_in_place_unless_somebody_still_reads_them() -> None:
    update = row("AssignAddVariableOp", "add", ["w", "x"], [64], outputs=[])
    assert follow([update]) == [("batch", 256)]
    read = row("ReadVariableOp", "read", ["w"], [64])
    late = row("Mul", "late", ["read", "x", "^add"], [64])  # over what the variable was
    assert follow([read, {**update, "inputs": ["w", "x", "^read"]}, late]) == [("batch", 256), ("add", 256)]


def test_of_a_condition_the_branch_for_true_is_followed() -> None:
    nodes = [
        row("Greater", "p", ["x", "x"], [], outputs=[["bool", []]], host=[[], [0]]),
        row("Switch", "s", ["x", "p"], [64], outputs=[["float32", [64]], ["float32", [64]]]),
        row("Sum", "no", ["s:0"], [64]),
        row("Exp", "yes", ["s:1"], [64]),
        row("Merge", "m", ["no", "yes"], [64], outputs=[["float32", [64]], ["int32", []]]),
        row("Neg", "after", ["m"], [64]),
    ]
    assert [name for name, _ in follow(nodes)] == ["batch", "yes"]  # Neg writes over it


def test_zeros_of_the_optimizer_are_one_tensor_until_they_are_updated() -> None:
    slots = [
        {"handle": handle, "name": str(handle), "trainable": False, "dtype": "float32", "shape": [8], "steps": []}
        for handle in (2, 3)
    ]
    update = [row("AssignAddVariableOp", f"u{name}", [name, "x"], [8], outputs=[]) for name in ("m", "v")]
    given = document(update, optimizer=[2, 3], captured={"m": 2, "v": 3}, variables=slots)
    trace = trace_of(read_step(given), "test", 2, NoLibrary())
    assert made(trace, 0) == [("2", 32)]
    assert made(trace, 1) == [("batch", 256), ("um", 32)]
    assert made(trace, 2) == [("batch", 256)]


def test_an_error_of_the_program_is_said() -> None:
    with pytest.raises(SourceError, match="no such"):
        read_step({"error": "no such model"})


def test_without_cudnn_workspaces_are_copies_and_counted() -> None:
    library = CudnnSpaces(device_named("H100"), None)
    asked = Convolution("forward", "float32", (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 8, 8), (1, 1), (1, 1), (1, 1), False)
    copies = 4 * (2 * 3 * 64 + 4 * 27 + 2 * 4 * 64)
    assert library.convolution(asked) == (copies, copies)
    assert library.estimated == 1


# --- programs and TensorFlow itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["import keras\n", "from tensorflow.keras import layers\n", "import keras, numpy\n"])
def test_a_program_of_keras_is_told_what_it_needs(text: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(text)
    with pytest.raises(SourceError, match=r"graphmem analyze keras:.*train.py:FUNCTION"):
        refuse_keras(program)


@pytest.mark.parametrize("text", ["import torch\nimport keras\n", "print(1)\n", "def broken(:\n"])
def test_other_programs_run(text: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(text)
    refuse_keras(program)


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_the_installed_tensorflow_prepares_what_was_recorded() -> None:
    estimate = analyze(
        f"keras:{steps.MODELS}:mlp", device=steps.CARD, alloc_conf="allow_growth:true", runtime="tensorflow"
    )
    assert estimate.allocated == steps.predicted("mlp")[-1]
