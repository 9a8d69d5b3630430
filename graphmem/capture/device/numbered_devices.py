"""``torch.device(0)``: C++ asks which accelerator this build has (``Device.cpp``, 2.13), and there may be none.

Libraries write devices so: ``device_map={"": 0}`` is read by transformers and accelerate as ``torch.device(0)``. The
class itself has to stay the same object: Dynamo knows it by its identity, pickles name it, ``type(x) is torch.device``
is asked. So not the name is replaced, but the constructor behind it: CPython calls ``tp_new`` of a class, which for a
class with a ``__new__`` in Python is a function that looks that up (``slot_tp_new``, ``Objects/typeobject.c``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphmem.capture.device.pretend_device import DEVICE
from graphmem.capture.patches import Patches

#: Where ``tp_new`` stands in a ``PyTypeObject``, in pointers: the 37th field behind a header of three
#: (``Include/cpython/object.h``, 3.9 to 3.13). :func:`_is_laid_out_so` looks whether it is true.
_TP_NEW = 39
_NAME = "__new__"


@contextlib.contextmanager
def numbered_devices() -> Iterator[None]:
    """Until the end, a bare number is a CUDA device to the threads of the capture. Without CPython's layout of classes
    nothing changes, and the number is refused."""
    if not _is_laid_out_so():
        yield
        return
    device = torch.device
    slot, table = _slot(device), gc.get_referents(vars(device))[0]
    c_function, wrapper = slot.value, table[_NAME]
    table[_NAME] = staticmethod(_new(_called_by(c_function), Patches().threads.only(lambda: True)))
    slot.value = _slot(_Own).value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(device))
    try:
        yield
    finally:
        slot.value, table[_NAME] = c_function, wrapper
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(device))


def _new(original: Callable[..., torch.device], is_here: Callable[[], bool | None]) -> Callable[..., torch.device]:
    def new(cls: type, *args: object, **kwargs: object) -> torch.device:
        given = args[0] if len(args) == 1 and not kwargs else kwargs.get("device") if not args else None
        if type(given) is int and given >= 0 and is_here():
            return original(cls, (DEVICE.type, given), {})
        return original(cls, args, kwargs)

    return new


def _called_by(c_function: int) -> Callable[..., torch.device]:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object)
    called: Callable[..., torch.device] = prototype(c_function)
    return called


class _Own:
    """A class with a constructor in Python: its ``tp_new`` is the function that looks it up."""

    def __new__(cls) -> Any:
        return super().__new__(cls)


class _Inheriting:
    """A class without one: its ``tp_new`` is that of ``object``."""


def _slot(kind: type) -> ctypes.c_size_t:
    return ctypes.c_size_t.from_address(id(kind) + _TP_NEW * ctypes.sizeof(ctypes.c_void_p))


def _is_laid_out_so() -> bool:
    own, inheriting, plain = (_slot(kind).value for kind in (_Own, _Inheriting, object))
    return inheriting == plain != own and _slot(torch.device).value not in (0, own, plain)
