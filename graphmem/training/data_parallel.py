"""Data-parallel training: one process a card, each with the whole model."""

from __future__ import annotations

from typing import Any

from graphmem.base.options import REQUIRED, above_zero, check_values, documented, option
from graphmem.base.records import public_value
from graphmem.training.processes import check_world_size

#: One option of the command line for several fields.
_BUCKET: dict[str, Any] = {"flags": "--ddp-option", "keyed": True}


@documented
@public_value(frozen=True, slots=True)
class DataParallel:
    """``torch.nn.parallel.DistributedDataParallel`` around the model; the analysis is of one process, and the batch is
    that of one process. Raises :class:`UsageError` for a field that is not accepted."""

    world_size: int = option(
        REQUIRED,
        "Data-parallel training (DistributedDataParallel); needs --world-size.",
        check_world_size,
        flags="--ddp",
        is_flag=True,
        opens=True,
    )
    bucket_cap_mb: float | None = option(
        None, "Size of a gradient bucket in MiB. Default: a first one of 1, then 25.", above_zero, **_BUCKET
    )
    gradient_as_bucket_view: bool = option(False, "Gradients are views of the buckets instead of copies.", **_BUCKET)
    static_graph: bool = option(False, "The same parameters are used in every iteration.", **_BUCKET)
    find_unused_parameters: bool = option(False, "Look for parameters that get no gradient.", **_BUCKET)
    broadcast_buffers: bool = option(True, "Broadcast buffers before every forward pass.", **_BUCKET)

    def __post_init__(self) -> None:
        check_values(self)

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
