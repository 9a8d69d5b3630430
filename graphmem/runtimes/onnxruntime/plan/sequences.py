"""The memory of sequences: tensors that several of them share.

``core/providers/cpu/sequence/sequence_ops.cc``: a tensor that is put into a sequence is copied, those that are in it
already are shared with the sequence before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphmem.graph.model import Node, TensorSpec

if TYPE_CHECKING:
    from graphmem.runtimes.onnxruntime.plan.runs import Frame


def make_sequence(frame: Frame, node: Node) -> None:
    """The sequence that a node makes."""
    name = node.key
    spec = frame.graph.tensors[name]
    shapes = spec.items or ()
    kept: tuple[int, ...] = ()
    if node.op_type == "SequenceInsert":
        kept = frame.sequence(node.inputs[0])
        shapes = (frame.graph.tensors[node.inputs[1]].shape,)
    elif node.op_type == "SequenceErase":
        kept, shapes = frame.sequence(node.inputs[0])[: len(shapes)], ()
    taken = [frame.take(TensorSpec(name, spec.dtype, shape).nbytes, name) for shape in shapes]
    frame.sequences[name] = (*kept, *taken)
    frame.hold(frame.sequences[name])
