"""Layers of experts: ``FusedMoE`` with Triton's kernels (layers/fused_moe)."""

from __future__ import annotations

from graphmem.serving.vllm.models.base import ExpertShape, Shape
from graphmem.serving.vllm.run import Run, Tensor


class Experts:
    """A router and its experts, their weights in two tensors."""

    def __init__(self, run: Run, name: str, shape: Shape, experts: ExpertShape) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """After loading."""

    def __call__(self, tokens: int) -> Tensor:
        raise NotImplementedError
