"""The walker that reads a model without its weights: everything else must come through untouched."""

from __future__ import annotations

import io
import itertools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from graphmem.graph.contents import contents_of
from graphmem.graph.onnx_stream import KEPT_PAYLOAD_BYTES, MalformedError, strip_weights
from tests.support import onnx_samples as samples
from tests.support.examples import examples
from tests.support.onnx_samples import model, value


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    data = proto.SerializeToString()
    return onnx.ModelProto.FromString(strip_weights(io.BytesIO(data), len(data)))


def tensors_of(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    constants = [a.t for node in proto.graph.node for a in node.attribute if a.HasField("t")]
    return [*proto.graph.initializer, *constants]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 600), max_size=6), st.booleans(), st.text(max_size=1500))
def test_only_large_payloads_are_dropped(sizes: list[int], as_nodes: bool, text: str) -> None:
    arrays = [np.arange(size, dtype=np.float32) for size in sizes]
    protos = [numpy_helper.from_array(array, f"t{i}") for i, array in enumerate(arrays)]
    nodes = [helper.make_node("Constant", [], [t.name], value=t, doc_string=text) for t in protos] if as_nodes else []
    proto = model(nodes, [value("x", ["batch"])], [value("x", ["batch"])], [] if as_nodes else protos)
    proto.graph.doc_string = text
    expected = onnx.ModelProto()
    expected.CopyFrom(proto)
    for tensor in tensors_of(expected):
        if len(tensor.raw_data) > KEPT_PAYLOAD_BYTES:
            tensor.ClearField("raw_data")
    found = stripped(proto)
    tokens: dict[int, str] = {}
    for tensor in tensors_of(found):
        if tensor.doc_string:
            assert tokens.setdefault(tensor.dims[0], tensor.doc_string) == tensor.doc_string
        tensor.ClearField("doc_string")
    assert len(set(tokens.values())) == len(tokens) == len({n for n in sizes if n * 4 > KEPT_PAYLOAD_BYTES})
    assert found == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=6), st.booleans())
def test_constants_are_alike_where_all_their_elements_are(parts: list[tuple[int, int]], computed: bool) -> None:
    """The first elements of all are equal; ``computed``: they are what a node makes of them."""
    arrays = [np.array([0.0] * 400 + [float(a), float(b)], np.float32) for a, b in parts]
    constants = [numpy_helper.from_array(array, f"t{i}") for i, array in enumerate(arrays)]
    nodes = [helper.make_node("Neg", [t.name], [f"n{i}"]) for i, t in enumerate(constants)] if computed else []
    graph = stripped(model(nodes, [value("x", [1])], [value("x", [1])], constants)).graph
    tokens = contents_of(graph)
    names = [f"{'n' if computed else 't'}{i}" for i in range(len(parts))]
    for (one, this), (other, that) in itertools.combinations(zip(names, parts, strict=True), 2):
        assert (tokens[one] == tokens[other]) == (this == that)


def test_a_tensor_in_a_subgraph_is_stripped() -> None:
    inner = helper.make_graph([], "inner", [], [], [samples.weights("w", (1000,))])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    out = stripped(model([node], [], [value("y", [1])]))
    assert [len(a.g.initializer[0].raw_data) for a in out.graph.node[0].attribute] == [0, 0]
    assert list(out.graph.node[0].attribute[0].g.initializer[0].dims) == [1000]


def test_typed_data_is_dropped() -> None:
    tensor = helper.make_tensor("w", onnx.TensorProto.FLOAT, (1000,), np.ones(1000, np.float32))
    assert len(tensor.float_data) == 1000
    assert len(stripped(model([], [], [], [tensor])).graph.initializer[0].float_data) == 0


def test_nesting_has_an_end() -> None:
    nested = _nested_graphs(80)
    with pytest.raises(MalformedError, match="nested deeper than 64"):
        strip_weights(io.BytesIO(nested), len(nested))


def _nested_graphs(levels: int) -> bytes:
    graph = b"\x52" + _varint(2000) + b"d" * 2000  # GraphProto.doc_string, so that every level is worth a visit
    for _ in range(levels):
        attribute = b"\x32" + _varint(len(graph)) + graph  # AttributeProto.g
        node = b"\x2a" + _varint(len(attribute)) + attribute  # NodeProto.attribute
        graph = b"\x0a" + _varint(len(node)) + node  # GraphProto.node
    return b"\x3a" + _varint(len(graph)) + graph


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
