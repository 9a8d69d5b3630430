"""What every part of the pretended device shares: its name, what it says of itself, replacements that are undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

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


class Patches:
    """Attribute replacements that are put back in reverse order."""

    _active: ClassVar[list[Patches]] = []

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, bool]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; an attribute that was only inherited, or absent, is deleted again on undo."""
        if not self._undo:
            self._active.append(self)
        own = name in vars(owner)
        self._undo.append((owner, name, vars(owner)[name] if own else None, own))
        setattr(owner, name, value)

    def undo(self) -> None:
        for entry in reversed(self._undo):
            self._put_back(*entry)
        if self._undo:
            self._active.remove(self)
        self._undo.clear()

    @staticmethod
    def _put_back(owner: Any, name: str, value: Any, own: bool) -> None:
        if own:
            setattr(owner, name, value)
        else:
            delattr(owner, name)

    @classmethod
    @contextlib.contextmanager
    def lifted(cls) -> Iterator[None]:
        """Until the end nothing is replaced: for imports, which remember what they find."""
        entries = [entry for patches in cls._active for entry in patches._undo]
        replacements = []
        for owner, name, value, own in reversed(entries):
            replacements.append((owner, name, vars(owner)[name]))
            cls._put_back(owner, name, value, own)
        try:
            yield
        finally:
            for replacement in reversed(replacements):
                setattr(*replacement)


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


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
