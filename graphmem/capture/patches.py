"""Replacements in PyTorch that are undone: of attributes, and of kernels in its dispatcher."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar


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


@contextlib.contextmanager
def quiet_registration() -> Iterator[None]:
    """Silences PyTorch's one-off warning that a kernel is overridden, which is what we mean to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
