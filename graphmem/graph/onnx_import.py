"""An ``.onnx`` file as a protobuf model without weights, and its parts as graphmem values. No tensor data is read.

Initializers of up to 1 KiB keep their values, because shapes, axes and indices live there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from graphmem.base.documents import open_file
from graphmem.errors import ShapeError, SourceError, first_line
from graphmem.graph.model import ELEMENT_BITS, Dimension, Node, TensorSpec
from graphmem.graph.onnx_stream import KEPT_PAYLOAD_BYTES, MalformedError, strip_weights

#: Names that onnx.TensorProto.DataType spells otherwise than numpy.
_RENAMED = {"float": "float32", "double": "float64"}
_ONNX_DOMAINS = ("", "ai.onnx")  # two spellings of one domain


def read_model(path: Path) -> onnx.ModelProto:
    """Read the model at ``path``, its local functions inlined. Raises :class:`SourceError`."""
    try:
        with open_file(path, pipes=False) as file:
            data = strip_weights(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None
    except MalformedError as error:
        raise SourceError(_malformed(path, error)) from None
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # DecodeError, or another one according to which protobuf is installed
        raise SourceError(f"{path} is not a valid ONNX model: {first_line(error)}") from None
    if not model.HasField("graph"):
        raise SourceError(f"{path} is not an ONNX model: it holds no graph{_hint(path)}")
    return checked_model(model, path)


def checked_model(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The model with its local functions inlined; ``path`` is its name in errors. Raises :class:`SourceError`."""
    if not model.HasField("graph"):
        raise SourceError(f"{path} is not an ONNX model: it holds no graph")
    if not model.opset_import:
        raise SourceError(f"{path} is not a valid ONNX model: it names no operator set")
    _check_names(model, path)
    return inline_functions(model, path) if model.functions else model


def _check_names(model: onnx.ModelProto, path: Path) -> None:
    """Refuse names that are not UTF-8: protobuf hands those out as bytes, which no later code expects."""
    for name in (*(entry.domain for entry in model.opset_import), *_names(model.graph)):
        if not isinstance(name, str):
            raise SourceError(f"{path} is damaged: the name {name!r} is not UTF-8")


def _names(graph: onnx.GraphProto) -> Iterator[Any]:
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
        for body in subgraphs(node).values():
            yield from _names(body)
    yield from (tensor.name for tensor in graph.initializer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)


def _malformed(path: Path, error: MalformedError) -> str:
    if error.looks_like_onnx:
        return f"{path} is truncated or damaged: {error}"
    return f"{path} is not an ONNX model: {error}{_hint(path)}"


def _hint(path: Path) -> str:
    with open_file(path, pipes=False) as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        return " (it is a Git LFS pointer: run git lfs pull)"
    if head[4:8] == b"ORTM":  # the file identifier of ort.fbs
        return " (it is in ORT format: use the .onnx it was made from)"
    if head.startswith(b"PK"):
        return " (it is a zip archive, as torch.save writes them)"
    return ""


def inline_functions(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """``model`` with every call of a model-local function replaced by its body, as ONNX Runtime does first."""
    from onnx import inliner

    _check_expansion(model, path)
    try:
        return inliner.inline_local_functions(model, convert_version=True)
    except Exception as error:  # the inliner raises whatever its C++ throws
        raise SourceError(f"{path}: its local functions cannot be inlined: {first_line(error)}") from None


#: Nodes of a graph with its local functions inlined, and calls of functions inside functions.
MOST_NODES = 500_000
MOST_CALLS = 64


def _check_expansion(model: onnx.ModelProto, path: Path) -> None:
    """Raises :class:`SourceError` for functions that call each other in a circle, or double and double again."""
    bodies = {(function.domain, function.name): function.node for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        if depth > MOST_CALLS:
            raise SourceError(f"{path}: its local functions call each other more than {MOST_CALLS} deep")
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in bodies and key not in sizes:
                sizes[key] = size(bodies[key], depth + 1)
            count += sizes.get(key, 1) + sum(size(graph.node, depth + 1) for graph in subgraphs(node).values())
        if count > MOST_NODES:
            raise SourceError(f"{path}: its local functions expand to more than {MOST_NODES:,} nodes")
        return count

    size(model.graph.node, 0)


def subgraphs(node: onnx.NodeProto) -> dict[str, onnx.GraphProto]:
    """The subgraphs of a node, by the name of the attribute that holds each."""
    return {a.name: a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH or a.HasField("g")}


def dtype_name(number: int, owner: str) -> str:
    """graphmem's name of an ONNX element type. Raises :class:`SourceError` for one this onnx does not know."""
    try:
        name = str(onnx.TensorProto.DataType.Name(number)).lower()
    except ValueError:
        raise SourceError(f"tensor {owner!r} has the unknown element type {number}") from None
    if name == "undefined":
        raise SourceError(f"tensor {owner!r} has no element type")
    name = _RENAMED.get(name, name)
    if name not in ELEMENT_BITS:
        raise SourceError(f"tensor {owner!r} has the element type {name}, whose size graphmem does not know")
    return name


def opset_versions(model: onnx.ModelProto) -> dict[str, int]:
    """Operator-set versions by domain, ``""`` for ONNX's own."""
    return {canonical_domain(entry.domain): entry.version for entry in model.opset_import}


def canonical_domain(domain: str) -> str:
    """``domain`` with the two spellings of ONNX's own made one."""
    return "" if domain in _ONNX_DOMAINS else domain


def spec_of_value(value: onnx.ValueInfoProto) -> TensorSpec | None:
    """The spec of a value as declared, or ``None`` when no shape is. An unnamed free dimension reads ``"?"``.

    Raises :class:`SourceError` when the value is no dense tensor.
    """
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "no type").replace("_type", "").replace("_", " ")
        raise SourceError(f"{value.name!r} is not a tensor ({found}); graphmem plans graphs of dense tensors only")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return TensorSpec(value.name, dtype_name(tensor.elem_type, value.name), _dims(tensor.shape.dim))


def _dims(dims: Iterable[Any]) -> tuple[Dimension, ...]:
    out: list[Dimension] = []
    for dim in dims:
        if dim.HasField("dim_value"):
            if dim.dim_value < 0:  # some exporters write -1 for a free dimension
                out.append("?")
                continue
            out.append(int(dim.dim_value))
        else:
            out.append(dim.dim_param or "?")
    return tuple(out)


def spec_of_tensor(tensor: onnx.TensorProto, name: str = "") -> TensorSpec:
    """The spec of a constant tensor. Raises :class:`ShapeError` for a negative dimension, and for external data that
    are not as long, which onnxruntime refuses too (``ResolveExternalDataInfoForTensorProto``, tensorprotoutils.cc)."""
    name = name or tensor.name
    if any(dim < 0 for dim in tensor.dims):
        raise ShapeError(f"constant {name!r} has the shape {list(tensor.dims)}; a constant's dimensions cannot be free")
    spec = TensorSpec(name, dtype_name(tensor.data_type, name), tuple(int(dim) for dim in tensor.dims))
    for entry in tensor.external_data:
        if entry.key == "length" and entry.value not in ("0", str(spec.nbytes)):
            raise ShapeError(
                f"constant {name!r} ({spec}) has {spec.nbytes} bytes; length of its external data is {entry.value!r}"
            )
    return spec


def value_of_tensor(tensor: onnx.TensorProto, directory: Path | None = None) -> npt.NDArray[Any] | None:
    """The values of a small constant, or ``None`` when it is large or its data are not there."""
    spec = spec_of_tensor(tensor)
    if spec.dtype == "string" or spec.nbytes > KEPT_PAYLOAD_BYTES:
        return None
    try:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return _small_external(tensor, spec, directory)
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, OSError, OverflowError, RuntimeError):  # the last for links in a circle
        return None


def _small_external(tensor: onnx.TensorProto, spec: TensorSpec, directory: Path | None) -> npt.NDArray[Any] | None:
    """A small tensor kept in the weights file beside the model: exporters move even shapes there on request."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = Path(entries.get("location", ""))
    if directory is None or location.is_absolute() or ".." in location.parts:
        return None
    place = (directory / location).resolve()  # a link may lead elsewhere, where other files than the model's lie
    if not place.is_relative_to(directory.resolve()) or not place.is_file():
        return None
    with open_file(place, pipes=False) as file:
        file.seek(int(entries.get("offset", "0")))
        data = file.read(spec.nbytes)
    copy = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data)
    return np.asarray(numpy_helper.to_array(copy)) if len(data) == spec.nbytes else None


def node_of_proto(proto: onnx.NodeProto, index: int) -> Node:
    """The node as a value. A nameless one is called after its first output, which is unique in a graph."""
    outputs = tuple(proto.output)
    name = proto.name or next(filter(None, outputs), f"{proto.op_type}_{index}")
    attributes = {a.name: _VALUES[a.type](a) for a in proto.attribute if a.type in _VALUES}
    kept = {key: value for key, value in attributes.items() if value is not None}
    return Node(name, proto.op_type, canonical_domain(proto.domain), tuple(proto.input), outputs, kept)


#: The value of an attribute by its type; others have none here.
_VALUES: Mapping[int, Callable[[onnx.AttributeProto], Any]] = {
    onnx.AttributeProto.INT: lambda given: int(given.i),
    onnx.AttributeProto.FLOAT: lambda given: float(given.f),
    onnx.AttributeProto.STRING: lambda given: given.s.decode("utf-8", "replace"),
    onnx.AttributeProto.INTS: lambda given: tuple(given.ints),
    onnx.AttributeProto.FLOATS: lambda given: tuple(given.floats),
    onnx.AttributeProto.STRINGS: lambda given: tuple(text.decode("utf-8", "replace") for text in given.strings),
    onnx.AttributeProto.TENSOR: lambda given: _one_number(given.t),
}


def _one_number(tensor: onnx.TensorProto) -> tuple[Any, ...] | None:
    value = value_of_tensor(tensor)
    return None if value is None or value.size != 1 else tuple(value.reshape(-1).tolist())
