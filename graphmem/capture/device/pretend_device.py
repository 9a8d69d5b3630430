"""What every part of the pretended device shares: its name, what it says of itself, and the way to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from graphmem.devices import DEFAULT_DEVICE, Device, device_named

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class PretendDevice:
    """What user code can ask the device about itself."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    sm_count: int
    max_threads_per_sm: int
    cublas_workspace_bytes: int | None = None
    #: Names of those fields that decide nothing unless the step's own code looks at them, once it did.
    told: set[str] = field(default_factory=set, compare=False, repr=False)

    def tell_name(self) -> str:
        """The name, to the step's own code."""
        self.told.add("name")
        return self.name

    def tell_total_bytes(self) -> int:
        """The memory of the card, to the step's own code."""
        self.told.add("total_bytes")
        return self.total_bytes


def pretended(card: Device) -> PretendDevice:
    """The card as user code sees it; one that is no CUDA card has the multiprocessors of the default one."""
    like = card if card.compute_capability is not None else device_named(DEFAULT_DEVICE)
    assert like.compute_capability is not None
    return PretendDevice(
        card.name,
        like.compute_capability,
        card.capacity_bytes,
        like.sm_count,
        like.max_threads_per_sm,
        card.cublas_workspace_bytes,
    )


def move(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Copy every tensor in ``value`` to the device, in order; floating-point ones become ``dtype`` first if given."""
    if isinstance(value, torch.Tensor):
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        return value.to(DEVICE)
    if isinstance(value, dict):
        return type(value)({key: move(item, dtype) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move(item, dtype) for item in value)
    return value
