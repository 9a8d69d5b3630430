"""Loops that count are followed by arithmetic; the arithmetic is held against following every run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from graphmem.graph.asked import Asked
from graphmem.graph.binding import bind
from graphmem.graph.model import TensorSpec
from graphmem.graph.shapes import Propagation, facts_of, propagate
from tests.support.examples import examples

COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")


def counting_loop(start: int, step: int, limit: int, comparison: str, *, most: int, before: bool) -> onnx.ModelProto:
    """``while compare(i, limit): i += step; collect a row`` of at most ``most`` runs; ``before`` compares the number
    that a run is given, not the one it gives."""
    compared = "i" if before else "next"
    body = helper.make_graph(
        [
            helper.make_node("Add", ["i", "step"], ["next"]),
            helper.make_node("Cast", [compared], ["wide"], to=TensorProto.DOUBLE),
            helper.make_node("Cast", ["limit"], ["wide_limit"], to=TensorProto.DOUBLE),
            helper.make_node(comparison, ["wide", "wide_limit"], ["again"]),
            helper.make_node("Relu", ["row"], ["made"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("kept", TensorProto.INT64, []),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.INT64, []),
            helper.make_tensor_value_info("kept", TensorProto.INT64, []),
            helper.make_tensor_value_info("made", TensorProto.FLOAT, [3]),
        ],
        [numpy_helper.from_array(np.array(step), "step")],
    )
    constants = {"start": start, "limit": limit, "most": most, "seven": 7}
    graph = helper.make_graph(
        [
            helper.make_node("Loop", ["most", "", "start", "seven"], ["last", "kept_last", "rows"], body=body),
            helper.make_node("Reshape", ["rows", "sizes"], ["flat"]),
            helper.make_node("Range", ["zero", "last", "one"], ["range"]),
        ],
        "graph",
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("flat", TensorProto.FLOAT, [None])],
        [
            *(numpy_helper.from_array(np.array(v), k) for k, v in {**constants, "zero": 0, "one": 1}.items()),
            numpy_helper.from_array(np.array([-1]), "sizes"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def followed(model: onnx.ModelProto) -> Propagation:
    return propagate(facts_of(model), bind([TensorSpec("row", "float32", (3,))], Asked(), []))


def runs_of(start: int, step: int, limit: int, comparison: str, *, most: int, before: bool) -> tuple[int, int]:
    """Runs and the last number, one run after the other."""
    holds = {"Less": int.__lt__, "LessOrEqual": int.__le__, "Greater": int.__gt__, "GreaterOrEqual": int.__ge__}
    number = start
    for run in range(1, most + 1):
        given, number = number, number + step
        if not holds[comparison](given if before else number, limit):
            return run, number
    return most, number


@settings(max_examples=examples(150), deadline=None)
@given(
    start=st.integers(-20, 20),
    step=st.integers(-3, 3),
    limit=st.integers(-30, 30),
    comparison=st.sampled_from(COMPARISONS),
    most=st.integers(1, 40),
    before=st.booleans(),
)
def test_runs_and_last_number_are_those_of_the_loop(
    start: int, step: int, limit: int, comparison: str, most: int, before: bool
) -> None:
    state = followed(counting_loop(start, step, limit, comparison, most=most, before=before))
    runs, last = runs_of(start, step, limit, comparison, most=most, before=before)
    assert state.specs["rows"].shape == (runs, 3)
    assert state.specs["range"].shape == (max(0, last),)  # the number is known after the loop
    assert int(state.values["kept_last"]) == 7


def test_long_loops_take_no_longer() -> None:
    """More runs than are ever followed one by one."""
    state = followed(counting_loop(0, 1, 50_000, "Less", most=1 << 40, before=False))
    (body,) = (bodies["body"] for bodies in state.bodies.values())
    assert state.specs["rows"].shape == (50_000, 3)
    assert len(body.states) <= 2


@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("before", [False, True])
def test_as_onnx_runtime_runs_it(comparison: str, before: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    step = 2 if comparison.startswith("Less") else -2
    model = counting_loop(0, step, 5 * step, comparison, most=1000, before=before)
    model.ir_version = 10
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (flat,) = session.run(None, {"row": np.zeros(3, np.float32)})
    assert followed(model).specs["flat"].shape == flat.shape
