"""Buffers of operators that compute distances between vectors: ``dist``, ``cdist``, ``pdist``.

Sources: ATen/native/Distance.cpp (``_euclidean_dist``), ATen/native/cuda/DistanceKernel.cu,
ATen/native/ReduceOps.cpp (``dist``) of PyTorch 2.13; orders observed on its CUDA build.
"""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.reduction import write_sum
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule


@recorded_rule("aten.dist.default")
def dist_rule(call: Call) -> Script | None:
    """The norm of a difference that is a tensor of its own."""
    shape = torch.broadcast_shapes(call.self.shape, call.other.shape)
    difference = torch.empty(shape, dtype=call.outputs[0].dtype, device="meta")
    script = Script()
    held = script.take(bytes_of(difference), "difference")
    script.call("aten.linalg_vector_norm", difference, 2, card=call.card, outputs=call.outputs, births=[0])
    return script.give(held)


@recorded_rule("aten._euclidean_dist.default")
def euclidean_rule(call: Call) -> Script | None:
    """Distances by one matrix product, of vectors to which norms and ones are appended."""
    left, right = call.x1, call.x2
    if call.outputs[0].numel() == 0 or left.shape[-1] == 0:
        return None
    script = Script()
    norms = [_norms(script, side, call.card) for side in (left, right)]
    padded = []
    for side, held in zip((left, right), norms, strict=True):
        scaled = [script.take(bytes_of(side), "vectors times -2")] if side is left else []
        width = side.shape[-1] + 2
        size = bytes_of(side) // side.shape[-1] * width
        padded.append(script.take(size, "vectors with norms and ones"))
        script.give(*reversed(held), *scaled)
    return script.output(0).product().give(*reversed(padded))


def _norms(script: Script, side: torch.Tensor, card: Card) -> list[int]:
    """Squared norms, and as many ones."""
    rows = bytes_of(side) // side.shape[-1]
    squares = script.take(bytes_of(side), "squares")
    held = [script.take(rows, "squared norms")]
    like = torch.empty(side.shape, dtype=side.dtype, device="meta")
    write_sum(script, like, [-1], side.dtype, card, keepdim=True)
    script.give(squares)
    return [*held, script.take(rows, "ones")]


@recorded_rule("aten._cdist_backward.default")
def cdist_backward_rule(call: Call) -> Script | None:
    """A term for every pair and every component, then summed."""
    distances, width = call.cdist, call.x1.shape[-1]
    if call.p == 0 or distances.numel() == 0 or width == 0:
        return None
    return Script().output(0).scratch(bytes_of(distances) * width, "terms of every pair")


@recorded_rule("aten._pdist_backward.default")
def pdist_backward_rule(call: Call) -> Script | None:
    tensor = call.self
    if call.p == 0 or tensor.shape[0] <= 1 or tensor.shape[1] == 0:
        return None
    return Script().output(0).scratch(bytes_of(tensor) * (tensor.shape[0] - 1), "terms of every pair")
