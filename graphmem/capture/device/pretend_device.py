"""The pretended device: its name, its facts, and copies of tensors to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from graphmem.devices import Device

DEVICE = torch.device("cuda", 0)
#: ``torch.cuda``, and those of its modules that import names from each other.
CUDA_MODULES = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards that the analysed process finds: how many, and which one is its own."""

    count: int = 1
    own: torch.device = DEVICE


_cards = Cards()


def cards() -> Cards:
    """Those of the capture that runs."""
    return _cards


@contextlib.contextmanager
def numbered(count: int, own: int) -> Iterator[None]:
    """Until the end the process finds ``count`` cards, of which number ``own`` is its own."""
    global _cards
    before, _cards = _cards, Cards(count, torch.device("cuda", own))
    try:
        yield
    finally:
        _cards = before


def device_of(device: object) -> torch.device:
    """``torch.device(device)``, made only where it is not there: during a capture that takes a microsecond."""
    return device if isinstance(device, torch.device) else torch.device(device)


@dataclass(frozen=True, slots=True)
class ShownCard:
    """The card as the step's own code sees it, in facts that decide nothing else; ``asked`` is filled with those that
    the code read: ``name``, ``total_bytes``, ``free_bytes``, ``l2_cache_bytes``, and ``allocator`` for what depends
    on its options too."""

    card: Device
    asked: set[str] = field(default_factory=set)

    def name(self) -> str:
        """The name of the card."""
        self.asked.add("name")
        return self.card.name

    def total_bytes(self) -> int:
        """The memory of the card."""
        self.asked.add("total_bytes")
        return self.card.capacity_bytes

    def empty_bytes(self) -> int:
        """Free bytes while nothing but the context, and the memory of others, is on the card."""
        self.asked.add("free_bytes")
        return max(0, self.card.capacity_bytes - self.card.taken_bytes)

    def l2_cache_bytes(self) -> int:
        """The second-level cache of the card. Raises ``AttributeError`` where it is unknown."""
        self.asked.add("l2_cache_bytes")
        if self.card.l2_cache_bytes is None:
            raise AttributeError("the second-level cache of this card is not known to graphmem")
        return self.card.l2_cache_bytes


def move(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Copy every tensor in ``value`` to the device, in order; floating-point ones become ``dtype`` first if given."""
    if isinstance(value, torch.Tensor):
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        return value.to(_cards.own)
    if isinstance(value, dict):
        return type(value)({key: move(item, dtype) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move(item, dtype) for item in value)
    return value
