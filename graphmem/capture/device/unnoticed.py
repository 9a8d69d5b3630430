"""No library finds out that it is being analysed.

Libraries ask whether a tensor is fake, and then take the path they keep for exporters: transformers builds a 4-D mask
that no card makes (``is_tracing`` in ``transformers/utils/import_utils.py``, 5.x). PyTorch's own code has to know, so
the class is hidden by who asks: outside ``torch``, ``torch._subclasses.FakeTensor`` is a class without instances, and
``is_fake`` is false (DeepSpeed holds that function since its own import: it is changed from within).

``type(t) is torch.Tensor`` is answered by :mod:`graphmem.capture.device.shown_types`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from graphmem.capture.threads import current_threads
from graphmem.capture.torch_internals import FakeTensor
from graphmem.capture.values.callers import package_that_asks
from graphmem.torch_names import private

_KNOWS = ("torch", "graphmem")
_LOST = "a library that recognises fake tensors takes the path it keeps for exporters"
fake_tensor: Any = private("torch._subclasses.fake_tensor", _LOST)
_subclasses: Any = private("torch._subclasses", _LOST)
_FAKE_TENSOR = FakeTensor
_recognises: Any = private("torch._subclasses.fake_tensor.is_fake", _LOST, None)
_is_fake: Any = _recognises and FunctionType(_recognises.__code__, _recognises.__globals__)
#: Under this name :func:`_answer` is found by what stands in the body of ``is_fake``.
_ANSWER = "_graphmem_is_fake"


class NoTensor:
    """Stands for ``FakeTensor`` in libraries: nothing is an instance of it."""


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
    hidden = (_subclasses, fake_tensor)
    before = [module.__class__ for module in hidden]
    for module in hidden:
        module.__class__ = _Hiding
    setattr(fake_tensor, _ANSWER, _answer)
    code = _recognises and _recognises.__code__
    if code is not None:
        _recognises.__code__ = _body.__code__
    try:
        yield
    finally:
        if code is not None:
            _recognises.__code__ = code
        delattr(fake_tensor, _ANSWER)
        for module, kind in zip(hidden, before, strict=True):
            module.__class__ = kind
