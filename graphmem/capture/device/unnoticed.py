"""No library finds out that it is being analysed.

Libraries ask whether a tensor is fake, and then take the path they keep for exporters: transformers builds a 4-D mask
that no card makes (``is_tracing`` in ``transformers/utils/import_utils.py``, 5.x). PyTorch's own code has to know, so
the class is hidden by who asks: outside ``torch``, ``torch._subclasses.FakeTensor`` is a class without instances.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import fake_tensor

from graphmem.capture.threads import current_threads
from graphmem.capture.values.callers import package_that_asks

_KNOWS = ("torch", "graphmem")
_FAKE_TENSOR = fake_tensor.FakeTensor


class NoTensor:
    """What a library finds in place of ``FakeTensor``: nothing is an instance of it."""


class _Hiding(ModuleType):
    """A module of PyTorch that shows ``FakeTensor`` to PyTorch and to graphmem only."""

    @property
    def FakeTensor(self) -> Any:  # noqa: N802 - PyTorch's name
        return NoTensor if current_threads() is not None and package_that_asks() not in _KNOWS else _FAKE_TENSOR


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Until the end, code outside PyTorch does not recognise fake tensors by their class."""
    hidden = (torch._subclasses, fake_tensor)
    before = [module.__class__ for module in hidden]
    for module in hidden:
        module.__class__ = _Hiding
    try:
        yield
    finally:
        for module, kind in zip(hidden, before, strict=True):
            module.__class__ = kind
