"""Distances and norms.

Sources: ATen/native/Distance.cpp (``_euclidean_dist``), ATen/native/cuda/DistanceKernel.cu,
ATen/native/ReduceOps.cpp (``dist``) of PyTorch 2.13; orders observed on its CUDA build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.reduction import reduction_buffers, sum_kernel
from graphmem.capture.kernels.parts.script import RULES, Card, Script, rule


@rule("aten.dist.default")
def dist_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """The norm of a difference that is a tensor of its own."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    difference = torch.empty(shape, dtype=outputs[0].dtype, device="meta")
    script = Script()
    held = script.take(bytes_of(difference), "difference")
    norm = RULES["aten.linalg_vector_norm.default"]((difference, 2), {}, outputs, card)
    if norm is None:
        script.output(0)
    else:
        _append(script, norm)
    script.give(held)
    return script


def _append(script: Script, other: Script) -> None:
    """The steps of ``other``, with tokens of ``script``."""
    tokens: dict[int, int] = {}
    for step in other.steps:
        if step.kind == "take":
            tokens[step.index] = script.take(step.bytes or 0, step.label)
        elif step.kind == "give":
            script.give(tokens[step.index])
        else:
            script.output(step.index, step.bytes)


@rule("aten._euclidean_dist.default")
def euclidean_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """Distances by one matrix product, of vectors to which norms and ones are appended."""
    left, right = args[:2]
    if outputs[0].numel() == 0 or left.shape[-1] == 0:
        return None
    script = Script()
    norms = [_norms(script, side, card) for side in (left, right)]
    padded = []
    for side, held in zip((left, right), norms, strict=True):
        scaled = [script.take(bytes_of(side), "vectors times -2")] if side is left else []
        width = side.shape[-1] + 2
        size = bytes_of(side) // side.shape[-1] * width
        padded.append(script.take(size, "vectors with norms and ones"))
        script.give(*reversed(held), *scaled)
    script.output(0)
    script.give(*reversed(padded))
    return script


def _norms(script: Script, side: torch.Tensor, card: Card) -> list[int]:
    """Squared norms, and as many ones."""
    rows = bytes_of(side) // side.shape[-1]
    squares = script.take(bytes_of(side), "squares")
    held = [script.take(rows, "squared norms")]
    like = torch.empty(side.shape, dtype=side.dtype, device="meta")
    reduction_buffers(like, [-1], True, sum_kernel(side.dtype, side.dtype), card).write(script)
    script.give(squares)
    return [*held, script.take(rows, "ones")]


@rule("aten._cdist_backward.default")
def cdist_backward_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """A term for every pair and every component, then summed."""
    distances, width = args[4], args[1].shape[-1]
    if args[3] == 0 or distances.numel() == 0 or width == 0:
        return None
    script = Script().output(0)
    script.give(script.take(bytes_of(distances) * width, "terms of every pair"))
    return script


@rule("aten._pdist_backward.default")
def pdist_backward_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    tensor = args[1]
    if args[2] == 0 or tensor.shape[0] <= 1 or tensor.shape[1] == 0:
        return None
    script = Script().output(0)
    script.give(script.take(bytes_of(tensor) * (tensor.shape[0] - 1), "terms of every pair"))
    return script


@rule("aten.norm.Scalar", "aten.norm.ScalarOpt_dim")
def norm_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """``at::norm`` ends in ``linalg_vector_norm``."""
    p = args[1] if len(args) > 1 and args[1] is not None else 2
    return RULES["aten.linalg_vector_norm.default"]((args[0], p, *args[2:]), kwargs, outputs, card)
