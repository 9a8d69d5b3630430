"""An ONNX graph under TensorFlow's executor: what is written over what, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from graphmem.errors import SourceError
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.runtimes.tensorflow.executor import FORWARDS, plan_executor
from graphmem.sources.onnx_file import load_onnx
from graphmem.trace import Category, EventKind, Trace
from tests import places
from tests.support import onnx_samples as samples
from tests.support.onnx_samples import model, save, value, weights

RECORDED = places.TENSORFLOW / "tf_forwarding.json"
EXECUTOR = RECORDED.with_name("tf_executor.json")
#: Operators that only rename a buffer, and one that ONNX has no name for.
RENAMING = {"Reshape", "Identity", "Squeeze", "BiasAdd"}


def activations(
    tmp_path: Path, nodes: list[Any], outputs: tuple[str, ...] = ("y",), shape: tuple[int, ...] = (4,)
) -> list[str]:
    """The storages that a run allocates for the outputs of its operators, by name."""
    proto = model(nodes, [value("x", list(shape))], [value(name, None) for name in outputs], [weights("w", shape)])
    trace = plan_executor(load_onnx(save(proto, tmp_path)), iterations=1)
    return [storage.label for storage in trace.storages if storage.category == Category.ACTIVATION]


def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def recorded_graphs() -> list[dict[str, Any]]:
    document = json.loads(EXECUTOR.read_text())
    return [{**graph, "side": document["side"], "inputs": document["inputs"]} for graph in document["graphs"]]


def graph_of(recorded: dict[str, Any]) -> Graph:
    rows, shape = recorded["rows"], (recorded["side"], recorded["side"])
    names = [f"t{number}" for number in range(recorded["inputs"] + len(rows))]
    nodes = [
        Node(names[position], kind, "", tuple(names[operand] for operand in operands), (names[position],))
        for position, (kind, operands) in enumerate(rows, recorded["inputs"])
    ]
    tensors = {name: TensorSpec(name, "float32", shape) for name in names}
    return Graph("recorded", tuple(nodes), tensors, tuple(names[: recorded["inputs"]]), (names[-1],), ())


def peak_and_count(trace: Trace) -> tuple[int, int]:
    """Most activations alive at once, and how many were allocated."""
    live = peak = count = 0
    for event in trace.events():
        if trace.storages[event.subject].category == Category.ACTIVATION:
            born = event.kind == EventKind.ALLOC
            live, count = live + (1 if born else -1), count + born
            peak = max(peak, live)
    return peak, count


@pytest.mark.parametrize("recorded", recorded_graphs(), ids=range(len(recorded_graphs())))
def test_random_graphs_hold_what_tensorflow_held(recorded: dict[str, Any]) -> None:
    trace = plan_executor(graph_of(recorded), iterations=1)
    assert peak_and_count(trace) == (recorded["peak"], recorded["count"])


def test_the_table_is_what_was_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())["forwards"]
    expected = {name: tuple(positions) for name, positions in recorded.items() if positions and name not in RENAMING}
    expected["Where"] = (1, 2)  # the recording counts the matrices only, not the condition before them
    assert recorded["Where"] == [0, 1]
    assert expected == FORWARDS


def test_a_chain_uses_one_buffer(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "a"), node("Relu", "a", "b"), node("Add", "b w", "c"), node("Sigmoid", "c", "y")]
    assert activations(tmp_path, nodes) == ["a"]


def test_nothing_is_written_over_inputs_and_weights(tmp_path: Path) -> None:
    assert sorted(activations(tmp_path, [node("Add", "x w", "a"), node("Neg", "x", "y")], ("a", "y"))) == ["a", "y"]


def test_a_tensor_with_another_reader_is_not_written_over(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "a"), node("Relu", "a", "b"), node("Add", "a b", "y")]
    assert activations(tmp_path, nodes) == ["a", "b"]  # the sum goes over a or b, which both end here


def test_a_tensor_read_twice_by_one_operator_is_not_written_over(tmp_path: Path) -> None:
    assert activations(tmp_path, [node("Neg", "x", "a"), node("Mul", "a a", "y")]) == ["a", "y"]


def test_the_readers_of_an_alias_count(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "a"), node("Identity", "a", "alias"), node("Relu", "a", "b"), node("Add", "alias b", "y")]
    assert activations(tmp_path, nodes) == ["a", "b"]


def test_other_shapes_and_types_are_not_written_over(tmp_path: Path) -> None:
    nodes = [node("ReduceSum", "x", "s", keepdims=1), node("Add", "s w", "y")]
    assert activations(tmp_path, nodes) == ["s", "y"]
    nodes = [node("Neg", "x", "a"), node("Cast", "a", "y", to=TensorProto.INT32)]
    assert activations(tmp_path, nodes) == ["a", "y"]


def test_products_and_normalizations_have_outputs_of_their_own(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "a"), node("MatMul", "a w", "b"), node("Transpose", "b", "y")]
    assert activations(tmp_path, nodes, shape=(4, 4)) == ["a", "b", "y"]


def test_an_output_may_be_another_name_and_is_not_written_over(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "a"), node("Identity", "a", "y"), node("Relu", "a", "z")]
    assert activations(tmp_path, nodes, ("y", "z")) == ["a", "z"]


def test_what_nobody_reads_is_freed_at_once(tmp_path: Path) -> None:
    proto = model([node("Neg", "x", "idle"), node("Neg", "x", "y")], [value("x", [4])], [value("y", None)])
    trace = plan_executor(load_onnx(save(proto, tmp_path)), iterations=1)
    assert peak_and_count(trace) == (1, 2)


def test_control_flow_is_refused_by_name(tmp_path: Path) -> None:
    path = save(samples.perceptron(2), tmp_path)
    graph = load_onnx(path)
    first = graph.nodes[0]

    looping = dataclasses.replace(graph, nodes=(dataclasses.replace(first, op_type="Loop"), *graph.nodes[1:]))
    with pytest.raises(SourceError, match=r"model\.onnx: control flow \(Loop\) is not planned for TensorFlow"):
        plan_executor(looping)
