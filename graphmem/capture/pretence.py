"""What every part of the pretended device shares: its name, what it says of itself, replacements that are undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class PretendDevice:
    """What user code can ask the device about itself."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    sm_count: int
    max_threads_per_sm: int


class Patches:
    """Attribute replacements that are put back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, bool]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; an attribute that was only inherited, or absent, is deleted again on undo."""
        own = name in vars(owner)
        self._undo.append((owner, name, vars(owner)[name] if own else None, own))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value, own in reversed(self._undo):
            if own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
        self._undo.clear()
