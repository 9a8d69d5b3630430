"""Runtimes: what executes the model, its default allocator, and what that assumes."""

from __future__ import annotations

from graphmem.errors import UsageError

RUNTIMES = ("pytorch", "onnxruntime", "tensorflow", "mxnet")
_SPELLINGS = {"torch": "pytorch", "ort": "onnxruntime", "tf": "tensorflow", "keras": "tensorflow"}


def runtime_named(name: str | None, default: str) -> str:
    """The canonical runtime name, ``default`` for None. Raises :class:`UsageError` listing the accepted ones."""
    if name is None:
        return default
    key = name.strip().lower().replace("-", "").replace("_", "")
    known = _SPELLINGS.get(key, key)
    if known in RUNTIMES:
        return known
    raise UsageError(f"unknown runtime {name!r}; accepted: {', '.join(RUNTIMES)}")
