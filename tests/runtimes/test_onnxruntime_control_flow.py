"""Branches, loops and scans against the installed ONNX Runtime: the arena of a real session after its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper

from graphmem.graph.asked import Asked
from graphmem.replay import replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import parse_options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import read_onnx
from tests.support import onnx_samples as samples
from tests.support.examples import examples
from tests.support.onnx_programs import COLUMNS, ROWS, program_of, programs

pytest.importorskip("onnxruntime")
ORACLE = Path(__file__).parents[1] / "oracles" / "onnxruntime" / "serve_arena.py"
COMPARED = ("MaxInUse", "TotalAllocated", "NumAllocs")
RUNS = 3


class Oracle:
    """Real sessions in a process of their own."""

    def __init__(self) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, str(ORACLE)], **pipes)

    def arena(self, path: Path, level: str, shapes: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
        request = {"model": str(path), "level": level, "runs": [shapes] * RUNS, "values": values}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, int] = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer
        return {name: answer[name] for name in COMPARED}


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    one = Oracle()
    yield one
    assert one.process.stdin is not None
    one.process.stdin.close()
    one.process.wait(10)


def predicted(path: Path, level: str, asked: Asked) -> dict[str, int]:
    graph = read_onnx(path, level).bind(asked)
    options = parse_options(f"provider:cpu,graph_optimization_level:{level}")
    trace = plan([[graph] * RUNS], options).trace
    allocator = default_allocator(options, reserved=reserved_allocations(trace, options))
    replay(trace, allocator)
    return {name: allocator.stats()[name] for name in COMPARED}


def compared(oracle: Oracle, directory: Path, level: str, steps: Any) -> tuple[dict[str, int], dict[str, int]]:
    """What a program is predicted to take, and what it takes."""
    model, conditions = program_of(steps)
    path = samples.save(model, directory)
    shapes = {"x": (ROWS, COLUMNS), **dict.fromkeys(conditions, (1,))}
    values = {name: (float(value),) for name, value in conditions.items()}
    return predicted(path, level, Asked(input_values=values)), oracle.arena(path, level, shapes, conditions)


@pytest.mark.parametrize("level", ["disabled", "all"])
def test_nested_programs_take_what_real_sessions_take(oracle: Oracle, tmp_path: Path, level: str) -> None:
    @settings(max_examples=examples(40), derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs)
    def compare(steps: Any) -> None:
        ours, real = compared(oracle, tmp_path, level, steps)
        assert ours == real

    compare()


def collecting() -> onnx.ModelProto:
    """A loop that puts a frame into a sequence in every run, and stacks them behind it."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("MatMul", ["before", "w"], ["after"]),
            helper.make_node("Relu", ["after"], ["frame"]),
            helper.make_node("SequenceInsert", ["frames", "frame"], ["more"]),
        ],
        "body",
        [
            samples.value("i", [], TensorProto.INT64),
            samples.value("going", [], TensorProto.BOOL),
            samples.value("before", [ROWS, COLUMNS]),
            helper.make_tensor_sequence_value_info("frames", TensorProto.FLOAT, None),
        ],
        [
            samples.value("still", [], TensorProto.BOOL),
            samples.value("after", [ROWS, COLUMNS]),
            helper.make_tensor_sequence_value_info("more", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("SequenceEmpty", [], ["none"]),
        helper.make_node("Loop", ["n", "", "x", "none"], ["last", "all"], body=body),
        helper.make_node("ConcatFromSequence", ["all"], ["y"], axis=1, new_axis=1),
    ]
    inputs = [samples.value("x", [ROWS, COLUMNS]), samples.value("n", [], TensorProto.INT64)]
    outputs = [samples.value("y", None), samples.value("last", None)]
    return samples.model(nodes, inputs, outputs, [samples.weights("w", (COLUMNS, COLUMNS))])


@pytest.mark.parametrize("level", ["disabled", "all"])
@pytest.mark.parametrize("count", [1, 7])
def test_a_sequence_that_a_loop_collects(oracle: Oracle, tmp_path: Path, level: str, count: int) -> None:
    path = samples.save(collecting(), tmp_path)
    ours = predicted(path, level, Asked(input_values={"n": (count,)}))
    assert ours == oracle.arena(path, level, {"x": (ROWS, COLUMNS), "n": ()}, {"n": count})


def test_nodes_of_a_subgraph_need_no_names(oracle: Oracle, tmp_path: Path) -> None:
    shape = [ROWS, COLUMNS]
    inside = [samples.value("i", [], TensorProto.INT64), samples.value("c", [], TensorProto.BOOL)]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["c2"]),
            helper.make_node("Softmax", ["v"], ["m"]),
            helper.make_node("Sigmoid", ["m"], ["s"]),  # in place, where the shapes of both are known
            helper.make_node("Tanh", ["s"], ["v2"]),
        ],
        "body", [*inside, samples.value("v", shape)],
        [samples.value("c2", [], TensorProto.BOOL), samples.value("v2", shape)],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)
    count = onnx.numpy_helper.from_array(np.array(4, np.int64), "count")
    ends = [samples.value("x", shape)], [samples.value("y", None)]
    path = samples.save(samples.model([loop], *ends, [count], opset=17), tmp_path)
    assert predicted(path, "all", Asked()) == oracle.arena(path, "all", {"x": (ROWS, COLUMNS)}, {})


def test_what_nobody_reads_is_not_lent(oracle: Oracle, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("TopK", ["x", "k"], ["first", "unread"]),
        helper.make_node("Neg", ["first"], ["h"]),
        helper.make_node("TopK", ["h", "k"], ["second", "unread too"]),
        helper.make_node("Neg", ["second"], ["y"]),
    ]
    inputs = [samples.value("x", [ROWS, COLUMNS])]
    path = samples.save(
        samples.model(nodes, inputs, [samples.value("y", None)], [samples.constant("k", [COLUMNS])]), tmp_path
    )
    assert predicted(path, "disabled", Asked()) == oracle.arena(path, "disabled", {"x": (ROWS, COLUMNS)}, {})
