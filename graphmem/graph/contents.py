"""Which constants of a graph hold the same elements, without reading them.

A constant's token is the place of its payload (:mod:`graphmem.graph.onnx_stream`), or digests the elements that were
kept; what is computed from constants alone has a token of the operator and of its inputs' tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha1

import onnx

from graphmem.graph.onnx_import import subgraphs

#: The fields of a tensor in which its elements may be.
PAYLOADS = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout")


def contents_of(graph: onnx.GraphProto) -> dict[str, str]:
    """Tokens of the constants of ``graph`` and of its subgraphs by name, equal for equal ones; where a name stands for
    several it has none."""
    found: dict[str, str] = {}
    several = set()
    for name, token in _tokens(graph, {}):
        if found.setdefault(name, token) != token:
            several.add(name)
    return {name: token for name, token in found.items() if name not in several}


def _tokens(graph: onnx.GraphProto, around: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    given = {value.name for value in graph.input}
    known = {name: token for name, token in around.items() if name not in given}
    own = {tensor.name: token for tensor in graph.initializer if (token := _of_tensor(tensor))}
    known |= own
    yield from own.items()
    for node in graph.node:
        for body in subgraphs(node).values():
            yield from _tokens(body, known)
        made = dict(_of_outputs(node, known))
        known |= made
        yield from made.items()


def _of_outputs(node: onnx.NodeProto, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].HasField("t"):
        token = _of_tensor(node.attribute[0].t)
        yield from ((node.output[0], token),) if token else ()
    elif not subgraphs(node) and not node.op_type.startswith(_RANDOM) and all(n in known for n in node.input if n):
        computed = onnx.NodeProto(op_type=node.op_type, domain=node.domain, attribute=node.attribute)
        inputs = "|".join(known.get(name, "") for name in node.input)
        token = _digest(computed.SerializeToString() + inputs.encode())
        yield from ((name, f"{token}/{position}") for position, name in enumerate(node.output) if name)


def _of_tensor(tensor: onnx.TensorProto) -> str:
    """``""`` where nothing is known of the elements: they lie in another file, or were left out."""
    is_inside = tensor.data_location != onnx.TensorProto.EXTERNAL
    if not (tensor.doc_string.isdecimal() or (is_inside and any(len(getattr(tensor, field)) for field in PAYLOADS))):
        return ""
    kind = f"{tensor.data_type} {list(tensor.dims)}"
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("name")
    if not tensor.doc_string.isdecimal():  # else the payload, which lies there
        copy.ClearField("doc_string")
    return f"{kind} {_digest(copy.SerializeToString())}"


def _digest(data: bytes) -> str:
    return sha1(data, usedforsecurity=False).hexdigest()
