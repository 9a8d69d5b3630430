"""Damaged ONNX files: whatever the bytes are, loading and planning either work or raise a GraphmemError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphmem.errors import GraphmemError
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import load_onnx
from tests.support import onnx_samples as samples
from tests.support.examples import examples
from tests.support.onnx_samples import constant, model, value, weights


def many_operators() -> onnx.ModelProto:
    """A model with attributes, constants, strings, a subgraph-free mix of operators and value_info."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1], strides=[2, 2], group=1),
        helper.make_node("MaxPool", ["c"], ["p"], name="pool", kernel_shape=[2, 2]),
        helper.make_node("Constant", [], ["k"], name="k", value=constant("", [0, -1])),
        helper.make_node("Reshape", ["p", "k"], ["f"], name="flat"),
        helper.make_node("Resize", ["c", "", "scales"], ["z"], name="resize", mode="nearest"),
        helper.make_node("Cast", ["f"], ["h"], name="cast", to=TensorProto.FLOAT16),
        helper.make_node("TopK", ["f", "one"], ["t", "i"], name="topk", axis=-1),
        helper.make_node("Concat", ["t", "f"], ["y"], name="concat", axis=1),
    ]
    constants = [weights("w", (4, 3, 3, 3)), constant("one", [1]), constant("scales", [1, 1, 2, 2], "float32")]
    outputs = [value(name, None) for name in ("y", "z", "i", "h")]
    info = [value("c", ["batch", 4, 4, 4])]
    return model(nodes, [value("x", ["batch", 3, 8, 8])], outputs, constants, value_info=info)


BASES = [m().SerializeToString() for m in (samples.perceptron, samples.dynamic_reshape, many_operators)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "damaged.onnx"


def load_and_plan(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    message = "none"
    try:
        plan([[load_onnx(path, batch=2)]])
    except GraphmemError as error:
        message = str(error)
    assert len(message.splitlines()) == 1, message
    return message == "none"


@pytest.mark.parametrize("base", BASES, ids=["perceptron", "reshape", "many"])
def test_the_bases_are_sound(scratch: Path, base: bytes) -> None:
    assert load_and_plan(scratch, base)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(BASES), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(scratch: Path, base: bytes, changes: list[tuple[int, int]]) -> None:
    data = bytearray(base)
    for position, byte in changes:
        data[position % len(data)] = byte
    load_and_plan(scratch, bytes(data))


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(BASES), st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_spliced_bytes(scratch: Path, base: bytes, start: int, length: int, target: int) -> None:
    start, target = start % len(base), target % len(base)
    piece = base[start : start + length % 64]
    for splice in (base[:target] + piece + base[target:], base[:target] + piece + base[target + len(piece) :]):
        load_and_plan(scratch, splice)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(BASES), st.integers(0, 10_000))
def test_truncated_bytes(scratch: Path, base: bytes, length: int) -> None:
    load_and_plan(scratch, base[: length % len(base)])


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=200))
@example(b"")
def test_arbitrary_bytes(scratch: Path, data: bytes) -> None:
    load_and_plan(scratch, data)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from([samples.perceptron, samples.dynamic_reshape, many_operators]),
    st.integers(0, 10),
    st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1]), max_size=5),
    st.sampled_from(["initializer", "dims", "attribute", "elem_type", "opset"]),
)
def test_extreme_numbers(
    scratch: Path, make: Callable[[], onnx.ModelProto], which: int, numbers: list[int], where: str
) -> None:
    proto = make()
    graph = proto.graph
    if where == "initializer":
        chosen = graph.initializer[which % len(graph.initializer)]
        chosen.CopyFrom(constant(chosen.name, numbers))
    elif where == "dims":
        graph.initializer[which % len(graph.initializer)].dims[:] = numbers
    elif where == "attribute":
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INTS:
                    attribute.ints[:] = numbers
                elif attribute.type == onnx.AttributeProto.INT and numbers:
                    attribute.i = numbers[0]
    elif where == "elem_type":
        graph.input[0].type.tensor_type.elem_type = which * 3
    elif numbers:
        proto.opset_import[0].version = numbers[0]
    load_and_plan(scratch, proto.SerializeToString())
