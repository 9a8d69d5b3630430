"""An ONNX model in memory as a :class:`graphmem.plan_memory.Graph`, and a planned order written back into it.

Shapes are those of :mod:`graphmem.graph`, which needs neither torch nor weights. What ONNX Runtime would make of the
model (fused nodes, reused buffers, patterns) is not in it: ``graphmem analyze model.onnx`` answers that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from graphmem.errors import GraphError, SourceError, first_line
from graphmem.graph import onnx_import
from graphmem.graph.liveness import ALIASING
from graphmem.graph.model import Graph as OnnxGraph
from graphmem.graph.model import Node as OnnxNode
from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.plan_memory.recompute.steps import Problem, Profile
from graphmem.sources.onnx_file import read_proto

#: Operators that give something else when they run again (the specification's, where no seed is given).
_RANDOM = frozenset(("Bernoulli", "Dropout", "Multinomial"))


def from_onnx(
    model: Any,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Graph:
    """The memory of an ``onnx.ModelProto``, or of a ``Model`` of onnx_ir. Its nodes are those of the model in their
    order, without ``Constant``, whose tensors are weights.

    ``batch`` binds the batch dimension, ``dims`` named dimensions, ``input_shapes`` whole inputs. Inputs and weights
    are held. ``Reshape`` and its like give views, but for outputs of the model. A node with a body (``If``, ``Loop``)
    holds the most that the body does, as scratch. A node costs the bytes that it makes.

    Raises :class:`graphmem.errors.GraphmemError` for what is no model, or has sizes that nothing binds.
    """
    proto = _proto(model)
    file = read_proto(proto, proto.graph.name or "the ONNX model")
    return _graph(file.bind(batch=batch, dims=dims or {}, input_shapes=input_shapes or {}))


def apply_onnx_order(model: onnx.ModelProto, order: Sequence[int], **sizes: Any) -> onnx.ModelProto:
    """A copy of ``model`` whose nodes stand in ``order``: indices of the nodes of :func:`from_onnx`'s graph, which
    ``sizes`` are handed to. ONNX Runtime keeps a file's order only with ``ExecutionOrder.PRIORITY_BASED``; its default
    one may need more memory than before. Raises :class:`graphmem.errors.GraphError` unless it is an order of them."""
    if model.functions:
        raise GraphError("the model has local functions; inline them first (onnx.inliner.inline_local_functions)")
    order = from_onnx(model, **sizes).checked(order)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    constants = [node for node in model.graph.node if _is_constant(node)]
    nodes = [node for node in model.graph.node if not _is_constant(node)]
    del copy.graph.node[:]
    copy.graph.node.extend([*constants, *(nodes[number] for number in order)])
    return copy


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and not onnx_import.canonical_domain(node.domain)


def _proto(model: Any) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    if type(model).__module__.startswith("onnx_ir"):
        import onnx_ir

        try:
            return onnx_ir.to_proto(model)
        except Exception as error:  # whatever its serializer raises
            raise SourceError(f"the model of onnx_ir cannot be written: {first_line(error)}") from None
    raise SourceError(f"a {type(model).__name__} is no ONNX model; give an onnx.ModelProto or a Model of onnx_ir")


def _graph(graph: OnnxGraph) -> Graph:
    names = dict.fromkeys((*graph.initializers, *graph.inputs, *graph.captured))
    buffers = [Buffer(name, graph.tensors[name].nbytes, held=True) for name in names]
    lies_in = {name: number for number, name in enumerate(names)}
    views: dict[str, int] = {}  # tensors that are views, and the node that gives each
    nodes = []
    for number, node in enumerate(graph.nodes):
        base = _base(graph, node)
        first = len(buffers)
        if base is not None:
            lies_in[node.outputs[0]], views[node.outputs[0]] = lies_in[base], number
        for name in filter(None, node.outputs):
            if name not in lies_in:
                lies_in[name] = len(buffers)
                buffers.append(Buffer(name, graph.tensors[name].nbytes))
        nodes.append(
            Node(
                node.name if node.op_type in node.name else f"{node.name} ({node.operator})",
                reads=tuple(dict.fromkeys(lies_in[name] for name in node.reads if name in lies_in)),
                makes=tuple(range(first, len(buffers))),
                scratch=_most_inside(graph, node),
                cost=float(sum(one.bytes for one in buffers[first:])),
                after=tuple(sorted({views[name] for name in node.reads if name in views})),
                repeatable=not (node.op_type in _RANDOM or node.op_type.startswith("Random")),
            )
        )
    return Graph(tuple(nodes), tuple(buffers), tuple(dict.fromkeys(lies_in[name] for name in graph.outputs)))


def _base(graph: OnnxGraph, node: OnnxNode) -> str | None:
    """The input that the node's output is a view of, as ONNX Runtime has it."""
    if node.domain or node.op_type not in ALIASING or node.outputs[0] in graph.outputs:
        return None
    same = graph.tensors[node.inputs[0]].nbytes == graph.tensors[node.outputs[0]].nbytes
    return node.inputs[0] if same else None


def _most_inside(graph: OnnxGraph, node: OnnxNode) -> int:
    """The most bytes that a body of the node holds beside what is around it."""
    inner = [_graph(one) for body in graph.bodies.get(node.key, ()) for one in body.graphs]
    around = [sum(buffer.bytes for buffer in one.buffers if buffer.held) for one in inner]
    return max(
        (Profile(Problem(one), one.order).peak - held for one, held in zip(inner, around, strict=True)), default=0
    )
