"""Data-parallel training: one process a card, each with the whole model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphmem.errors import UsageError
from graphmem.training.processes import check_world_size


@dataclass(frozen=True, slots=True)
class DataParallel:
    """``torch.nn.parallel.DistributedDataParallel`` around the model; the analysis is of one process.

    Args:
        world_size: number of processes, at least 1. The batch is that of one process.
        bucket_cap_mb: size of a gradient bucket in MiB, or None for PyTorch's (a first one of 1 MiB, then 25).
        gradient_as_bucket_view: gradients are views of the buckets instead of copies.
        static_graph: the same parameters are used in every iteration.
        find_unused_parameters: look for parameters that get no gradient.
        broadcast_buffers: broadcast buffers before every forward pass.

    Raises:
        UsageError: a field is not accepted.
    """

    world_size: int
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        cap = self.bucket_cap_mb
        if cap is not None and not (type(cap) in (int, float) and math.isfinite(cap) and cap > 0):
            raise UsageError(f"bucket_cap_mb is a number above 0 or None, not {cap!r}")

    def describe(self) -> str:
        """The wrapper in words: ``DDP over 8 processes (static_graph)``."""
        chosen = [
            name
            for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
            if getattr(self, name)
        ]
        if self.bucket_cap_mb is not None:
            chosen.append(f"bucket_cap_mb={self.bucket_cap_mb:g}")
        if not self.broadcast_buffers:
            chosen.append("broadcast_buffers=False")
        return f"DDP over {self.world_size} processes" + (f" ({', '.join(chosen)})" if chosen else "")
