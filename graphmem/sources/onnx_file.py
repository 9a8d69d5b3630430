"""An ``.onnx`` file as a bound :class:`~graphmem.graph.model.Graph`. Weights are not read and may be missing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.graph import onnx_import
from graphmem.graph.binding import bind
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.graph.shapes import Propagation, element_type, propagate

__all__ = ["load_onnx", "parse_dim", "parse_input_shape"]


def load_onnx(
    path: str | os.PathLike[str],
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Graph:
    """Load the ONNX model at ``path`` and find the shape of every tensor; neither torch nor a weight is needed.

    ``batch`` binds the batch dimension, ``dims`` named dimensions, ``input_shapes`` whole inputs. Raises
    :class:`~graphmem.errors.SourceError` for a file that is missing, a directory, truncated or no ONNX model, or that
    graphmem cannot plan; :class:`~graphmem.errors.ShapeError` for a dimension that is not bound or a shape that cannot
    be inferred; :class:`~graphmem.errors.UsageError` for a name that the model does not have.
    """
    file = Path(path)
    if file.is_dir():
        raise SourceError(f"{file} is a directory; give the .onnx file in it")
    if not file.exists():
        raise SourceError(f"{file} does not exist")
    try:
        model = onnx_import.read_model(file)
        return _bound_graph(model, file, batch, dims or {}, input_shapes or {})
    except GraphmemError as error:
        if str(error).isprintable():
            raise
        # a name of the file with a line break in it: the message must stay one line
        raise type(error)("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))) from None


def _bound_graph(
    model: onnx.ModelProto, path: Path, batch: int | None, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> Graph:
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    declared, shapeless = _declared([value for value in graph.input if value.name not in constants])
    binding = bind(declared, shapeless=shapeless, batch=batch, dims=dims, input_shapes=shapes)
    nodes = [onnx_import.node_of_proto(proto, index) for index, proto in enumerate(graph.node)]
    state = propagate(model, nodes, binding, path.parent)
    notes = (*binding.notes, *state.notes.items())
    return _graph(model, path, nodes, state, tuple(spec.name for spec in declared), notes)


def _declared(values: Sequence[onnx.ValueInfoProto]) -> tuple[list[TensorSpec], list[str]]:
    """The inputs as declared, and the names of those without a shape."""
    specs, shapeless = [], []
    for value in values:
        spec = onnx_import.spec_of_value(value)
        if spec is None:
            dtype = onnx_import.dtype_name(value.type.tensor_type.elem_type, value.name)
            spec = TensorSpec(value.name, dtype, ())
            shapeless.append(value.name)
        element_type(spec.dtype)
        specs.append(spec)
    if len({spec.name for spec in specs}) != len(specs):
        raise SourceError("two inputs of the graph have the same name")
    return specs, shapeless


def _graph(
    model: onnx.ModelProto,
    path: Path,
    nodes: Sequence[Node],
    state: Propagation,
    inputs: tuple[str, ...],
    notes: tuple[tuple[str, str], ...],
) -> Graph:
    """The graph as a value; ``Constant`` nodes are initializers, as ONNX Runtime makes them."""
    for spec in state.specs.values():
        spec.nbytes  # noqa: B018 - raises for a tensor beyond 63 bits, while its name is at hand
    return Graph(
        name=path.name,
        nodes=tuple(node for node in nodes if node.op_type != "Constant" or node.domain),
        tensors=dict(state.specs),
        inputs=inputs,
        outputs=tuple(dict.fromkeys(value.name for value in model.graph.output)),
        initializers=tuple(dict.fromkeys(state.constants)),
        opsets=tuple(sorted(state.opsets.items())),
        notes=notes,
    )


def parse_dim(text: str) -> tuple[str, int]:
    """Read the value of ``--dim``: ``"seq=128"``. Raises :class:`~graphmem.errors.UsageError`."""
    name, separator, value = text.rpartition("=")
    if not separator or not name or not value.isascii() or not value.isdecimal():
        raise UsageError(f"cannot read {text!r}; write --dim NAME=VALUE, for example --dim seq=128")
    return name, int(value)


def parse_input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read the value of ``--input-shape``: ``"x:1x3x224x224"``; ``"x:"`` is a scalar.

    The last colon separates, since tensor names may hold colons. Raises :class:`~graphmem.errors.UsageError`.
    """
    name, separator, dims = text.rpartition(":")
    parts = dims.split("x") if dims else []
    if not separator or not name or not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(
            f"cannot read {text!r}; write --input-shape NAME:DIMS, for example --input-shape x:1x3x224x224"
        )
    return name, tuple(int(part) for part in parts)
