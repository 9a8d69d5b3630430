"""PyTorch: which version, which allocator configuration, and the allocator they make."""

from __future__ import annotations

import importlib.metadata
import os
import re

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.errors import UsageError

#: The newest version whose rules were checked against recordings, taken when no torch is installed.
NEWEST = (2, 13)
OLDEST = (2, 4)


def version_named(text: str | None) -> tuple[int, int]:
    """(major, minor) of ``2.6`` or ``2.6.0+cu124``; None means the installed version, or the newest known.

    Raises :class:`UsageError` for text that is no version and for versions before 2.4.
    """
    if text is None:
        try:
            text = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return NEWEST
    match = re.match(r"\s*(\d+)\.(\d+)", text)
    version = (int(match.group(1)), int(match.group(2))) if match else None
    if version is None or not OLDEST <= version < (3, 0):
        oldest, newest = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
        raise UsageError(f"unknown torch version {text!r}; accepted: {oldest} to {newest}")
    return version


def configuration_text(given: str | None) -> str:
    """The allocator configuration: the given one, else that of the environment (CUDA's name wins, as in 2.13)."""
    if given is not None:
        return given
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def default_allocator(text: str, capacity_bytes: int | None, torch_version: tuple[int, int]) -> PyTorchCachingAllocator:
    """A fresh caching allocator. ``capacity_bytes`` is what the card has left for it, None for no limit.

    Raises :class:`UsageError` for a configuration that this version of PyTorch would refuse.
    """
    return PyTorchCachingAllocator(capacity_bytes, parse_alloc_conf(text, torch_version), torch_version)
