"""cuDNN's backend descriptors through ctypes: make, set, finalize, read.

Numbers of types and attributes are those of ``cudnn_graph_v9.h`` (cuDNN 9.20), which do not change within a major
version. ``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR``, a description of a device that takes the place of one, exists since
cuDNN 9.8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

_MESSAGE_BYTES = 4096


class CudnnError(Exception):
    """A call to cuDNN failed; the text is cuDNN's own reason with its status."""


class Kind(IntEnum):
    """``cudnnBackendDescriptorType_t``."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    PLAN = 5
    KNOB_CHOICE = 7
    FORWARD = 10
    BACKWARD_FILTER = 11
    BACKWARD_DATA = 12
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Type(IntEnum):
    """``cudnnBackendAttributeType_t``."""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19
    CHAR = 24


_C_TYPES: dict[Type, Any] = {
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.DOUBLE: ctypes.c_double,
    Type.DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}

Descriptor = int


class Descriptors:
    """Descriptors of a loaded cuDNN. Those made since :meth:`mark` go with :meth:`release`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._made: list[Descriptor] = []
        self._kept = 0
        library.cudnnBackendDestroyDescriptor.argtypes = [ctypes.c_void_p]
        library.cudnnBackendFinalize.argtypes = [ctypes.c_void_p]
        common: list[Any] = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        library.cudnnBackendSetAttribute.argtypes = [*common, ctypes.c_void_p]
        library.cudnnBackendGetAttribute.argtypes = [*common, ctypes.c_void_p, ctypes.c_void_p]

    def make(self, kind: Kind) -> Descriptor:
        """A new descriptor, to be set and finalized."""
        made = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(made)))
        assert made.value is not None
        self._made.append(made.value)
        return made.value

    def set(self, of: Descriptor, name: int, kind: Type, values: Sequence[Any]) -> None:
        """Set an attribute by its number."""
        array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
        self._check(self._library.cudnnBackendSetAttribute(of, name, int(kind), len(values), array))

    def set_text(self, of: Descriptor, name: int, text: str) -> None:
        """Set an attribute of characters."""
        data = text.encode()
        self._check(self._library.cudnnBackendSetAttribute(of, name, int(Type.CHAR), len(data), data))

    def finalize(self, descriptor: Descriptor) -> None:
        """Have cuDNN check it; afterwards it can be used and read."""
        self._check(self._library.cudnnBackendFinalize(descriptor))

    def count(self, of: Descriptor, name: int, kind: Type) -> int:
        """How many values an attribute has."""
        count = ctypes.c_int64()
        self._check(self._library.cudnnBackendGetAttribute(of, name, int(kind), 0, ctypes.byref(count), None))
        return count.value

    def numbers(self, of: Descriptor, name: int, kind: Type, at_most: int) -> list[int]:
        """The values of an attribute; none where the library does not give them."""
        array, count = (_C_TYPES.get(kind, ctypes.c_int) * at_most)(), ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(of, name, int(kind), at_most, ctypes.byref(count), array)
        return [] if status else list(array)[: min(count.value, at_most)]

    def fill(self, of: Descriptor, name: int, kind: Kind, at_most: int) -> list[Descriptor]:
        """The descriptors that an attribute holds. cuDNN fills ones that the caller has made."""
        made = [self.make(kind) for _ in range(at_most)]
        array, count = (ctypes.c_void_p * at_most)(*made), ctypes.c_int64()
        call = self._library.cudnnBackendGetAttribute
        self._check(call(of, name, int(Type.DESCRIPTOR), at_most, ctypes.byref(count), array))
        return [value for value in array[: min(count.value, at_most)] if value is not None]

    def mark(self) -> None:
        """Keep what has been made so far."""
        self._kept = len(self._made)

    def release(self) -> None:
        """Destroy what was made since :meth:`mark`, the newest first."""
        while len(self._made) > self._kept:
            self._library.cudnnBackendDestroyDescriptor(self._made.pop())

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.create_string_buffer(_MESSAGE_BYTES)
            self._library.cudnnGetLastErrorString(text, ctypes.c_size_t(_MESSAGE_BYTES))
            reason = " ".join(text.value.decode(errors="replace").split())
            raise CudnnError(f"status {status}{': ' + reason if reason else ''}")
