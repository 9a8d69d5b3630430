"""Working buffers of the CUDA provider's kernels: what they take from the arena while they run, and when; and what
kernels take when they are made.

Each rule names its source below ``onnxruntime/core/providers/cuda`` or ``contrib_ops/cuda`` and was compared with
recorded sessions of 1.31.1 (``tests/golden/onnxruntime/cuda``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from graphmem.graph.model import ELEMENT_BITS, Graph, Node
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries, network_of
from graphmem.runtimes.onnxruntime.kernels.tables import MICROSOFT
from graphmem.runtimes.onnxruntime.kernels.working_buffers import ONLY_OUTPUTS, OUTPUTS, Steps

Rule = Callable[[Node, Graph, Libraries], Steps]


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return tuple(int(d) for d in graph.tensors[name].shape)


def _itemsize(graph: Graph, name: str) -> int:
    return ELEMENT_BITS[graph.tensors[name].dtype] // 8


def _convolution(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``nn/conv.cc``: the plan's workspace, when the output is there."""
    size = libraries.convolution_workspace(node, graph)
    return (OUTPUTS, size) if size else ONLY_OUTPUTS


def _recurrent(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``rnn/cudnn_rnn_base.cc``: the sequences turned around where they run backward, an output that nobody wants,
    weights that are no constants, cuDNN's work space, and the output in ONNX's order."""
    network = network_of(node, graph, libraries)
    item = network.itemsize
    reverse = _is_reverse(node)
    taken = [network.rows * network.inputs * item] if reverse else []
    size = network.rows * network.hidden * network.directions * item
    has_output = bool(node.outputs and node.outputs[0])
    if not has_output:
        taken.append(size)
    if not _has_constant_weights(node, graph):
        taken.append(_weights_bytes(node, graph))
    taken.append(libraries.recurrent_workspace(network))
    if reverse or network.directions == 2:
        taken.append(size)
    return (OUTPUTS, *taken)


def _is_reverse(node: Node) -> bool:
    direction = node.attributes.get("direction", "forward")
    return (direction.decode() if isinstance(direction, bytes) else direction) == "reverse"


def _has_constant_weights(node: Node, graph: Graph) -> bool:
    constants = frozenset(graph.initializers)
    return all(name in constants for name in node.inputs[1:4] if name)


def _weights_bytes(node: Node, graph: Graph) -> int:
    """``ReorganizeWeights``: the weights as cuDNN lays them out, always with both biases."""
    weight, recurrence = (_shape(graph, name) for name in node.inputs[1:3])
    biases = 2 * recurrence[0] * recurrence[1]
    return (math.prod(weight) + math.prod(recurrence) + biases) * _itemsize(graph, node.inputs[1])


_RECURRENT = frozenset((("", "LSTM"), ("", "GRU"), ("", "RNN")))


def made_with(node: Node, graph: Graph, libraries: Libraries) -> Iterator[tuple[str, int]]:
    """(label, bytes) of what a kernel takes when it is made and keeps: ``CudnnRnnBase`` has the generators of a
    dropout that never happens, and its constant weights packed."""
    if (node.domain, node.op_type) in _RECURRENT:
        yield "dropout states", libraries.dropout_states()
        if _has_constant_weights(node, graph):
            yield f"{node.inputs[1]} (packed)", _weights_bytes(node, graph)


CONVOLUTIONS = frozenset((("", "Conv"), ("", "ConvTranspose"), (MICROSOFT, "FusedConv")))
RULES: dict[tuple[str, str], Rule] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(_RECURRENT, _recurrent),
}
#: Operators whose kernels are known to take working buffers, and whose rules are not written yet.
WITHOUT_RULE: frozenset[tuple[str, str]] = frozenset((
    ("", "Attention"), ("", "Einsum"), ("", "TopK"), ("", "NonMaxSuppression"),
    ("", "NonZero"), ("", "MatMulInteger"), ("", "ReduceSum"), ("", "ReduceMean"), ("", "ReduceMax"), ("", "ReduceMin"),
    ("", "ReduceProd"), ("", "ReduceL1"), ("", "ReduceL2"), ("", "ArgMax"), ("", "ArgMin"),
    (MICROSOFT, "Attention"), (MICROSOFT, "MultiHeadAttention"), (MICROSOFT, "GroupQueryAttention"),
    (MICROSOFT, "PackedAttention"), (MICROSOFT, "QAttention"), (MICROSOFT, "LongformerAttention"),
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"), (MICROSOFT, "MatMulNBits"), (MICROSOFT, "MoE"), (MICROSOFT, "QMoE"),
    (MICROSOFT, "GroupNorm"), (MICROSOFT, "SparseAttention"),
))  # fmt: skip
