"""No library finds out that it is being analysed.

Libraries ask whether a tensor is fake, and then take the path they keep for exporters: transformers builds a 4-D mask
that no card makes (``is_tracing`` in ``transformers/utils/import_utils.py``, 5.x). PyTorch's own code has to know, so
the class is hidden by who asks: outside ``torch``, ``torch._subclasses.FakeTensor`` is a class without instances, and
``is_fake`` says no (DeepSpeed holds that function since its own import: it is changed from within).

Not hidden: ``type(t) is torch.Tensor``, which is the interpreter's answer (DeepSpeed's ZeRO-3 asks it of outputs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses import fake_tensor

from graphmem.capture.threads import current_threads
from graphmem.capture.values.callers import package_that_asks

_KNOWS = ("torch", "graphmem")
_FAKE_TENSOR = fake_tensor.FakeTensor
_is_fake = FunctionType(fake_tensor.is_fake.__code__, fake_tensor.is_fake.__globals__)
#: Under this name :func:`_answer` is found by what stands in the body of ``is_fake``.
_ANSWER = "_graphmem_is_fake"


class NoTensor:
    """What a library finds in place of ``FakeTensor``: nothing is an instance of it."""


class _Hiding(ModuleType):
    """A module of PyTorch that shows ``FakeTensor`` to PyTorch and to graphmem only."""

    @property
    def FakeTensor(self) -> Any:  # noqa: N802 - PyTorch's name
        return NoTensor if current_threads() is not None and package_that_asks() not in _KNOWS else _FAKE_TENSOR


def _body(x: object) -> bool:
    return _graphmem_is_fake(x)  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _answer(x: object) -> bool:
    hidden = current_threads() is not None and package_that_asks(frames_between=1) not in _KNOWS
    return not hidden and bool(_is_fake(x))


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Until the end, code outside PyTorch does not recognise fake tensors by their class."""
    hidden = (torch._subclasses, fake_tensor)
    before = [module.__class__ for module in hidden]
    for module in hidden:
        module.__class__ = _Hiding
    setattr(fake_tensor, _ANSWER, _answer)
    code, fake_tensor.is_fake.__code__ = fake_tensor.is_fake.__code__, _body.__code__
    try:
        yield
    finally:
        fake_tensor.is_fake.__code__ = code
        delattr(fake_tensor, _ANSWER)
        for module, kind in zip(hidden, before, strict=True):
            module.__class__ = kind
