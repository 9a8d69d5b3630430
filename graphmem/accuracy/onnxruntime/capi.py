"""The C API of the installed onnxruntime through ctypes: its Python API does not tell what an arena holds.

The wheel ships ``capi/libonnxruntime.so``, whose table of functions only ever grows (``onnxruntime_c_api.h``, struct
``OrtApi``), so the slots below stay valid; checked with 1.31.1. Only what a measured session needs is here.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from graphmem.errors import UsageError

POINTER = c.c_void_p
#: The version of the API that is asked for, and the oldest onnxruntime that is measured: 1.24.
API_VERSION = 24
SLOTS = {
    "GetErrorMessage": 2, "CreateEnvWithCustomLogger": 4, "CreateSession": 7, "Run": 9, "CreateSessionOptions": 10,
    "EnableMemPattern": 16, "DisableMemPattern": 17, "SetSessionGraphOptimizationLevel": 23,
    "SetIntraOpNumThreads": 24, "CreateRunOptions": 39, "CreateTensorWithDataAsOrtValue": 49, "CreateMemoryInfo": 68,
    "AllocatorAlloc": 75, "AllocatorFree": 76,
    "ReleaseStatus": 93, "ReleaseValue": 96, "AddSessionConfigEntry": 130, "CreateAllocator": 131,
    "CreateAndRegisterAllocator": 144, "CreateArenaCfgV2": 164, "AddRunConfigEntry": 165, "RegisterAllocator": 176,
    "GetKeyValuePairs": 298, "ReleaseKeyValuePairs": 300, "AllocatorGetStats": 319,
}  # fmt: skip


class OrtError(RuntimeError):
    """An error of ONNX Runtime, in its own words."""


class _Base(c.Structure):
    _fields_ = (
        ("GetApi", c.CFUNCTYPE(POINTER, c.c_uint32)),
        ("GetVersionString", c.CFUNCTYPE(c.c_char_p)),
    )


@cache
def _loaded() -> tuple[Any, str]:
    """The table of functions and the library's version. Raises :class:`UsageError`."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise UsageError("measuring an ONNX session needs onnxruntime; install it with: pip install onnxruntime")
    found = sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so*"))
    if not found:
        raise UsageError("this onnxruntime has no capi/libonnxruntime.so; ONNX sessions are measured on Linux")
    library = c.CDLL(str(found[-1]))
    library.OrtGetApiBase.restype = c.POINTER(_Base)
    base = library.OrtGetApiBase().contents
    version, table = base.GetVersionString().decode(), base.GetApi(API_VERSION)
    if not table:
        raise UsageError(f"onnxruntime {version} is too old to be measured; 1.24 or newer tells what its arena holds")
    return c.cast(table, c.POINTER(POINTER)), version


def library_version() -> str:
    """The version of the library. Raises :class:`UsageError` where none can be used."""
    return _loaded()[1]


def function(name: str, *types: Any, result: Any = POINTER) -> Callable[..., Any]:
    """The function in the slot of ``name``."""
    return c.CFUNCTYPE(result, *types)(_loaded()[0][SLOTS[name]])


def check(status: Any) -> None:
    """Raise :class:`OrtError` unless the status is null."""
    if status:
        text = function("GetErrorMessage", POINTER, result=c.c_char_p)(status).decode(errors="replace")
        function("ReleaseStatus", POINTER, result=None)(status)
        raise OrtError(text)


def call(name: str, *types_and_values: tuple[Any, Any]) -> None:
    """Call a function that returns a status."""
    check(function(name, *(kind for kind, _ in types_and_values))(*(value for _, value in types_and_values)))


def made(name: str, *types_and_values: tuple[Any, Any]) -> Any:
    """Call a function whose last argument receives what it makes."""
    out = POINTER()
    call(name, *types_and_values, (c.POINTER(POINTER), c.byref(out)))
    return out


_LOGGER = c.CFUNCTYPE(None, POINTER, c.c_int, c.c_char_p, c.c_char_p, c.c_char_p, c.c_char_p)
#: What ONNX Runtime holds pointers to for as long as the process lives.
kept: list[Any] = []


def environment(sink: Callable[[str], None] | None = None) -> Any:
    """An environment whose log lines, all of them, go to ``sink``."""

    def log(_: Any, severity: int, category: bytes, identifier: bytes, where: bytes, text: bytes) -> None:
        if sink is not None:
            sink(text.decode(errors="replace"))

    callback = _LOGGER(log)
    kept.append(callback)
    return made("CreateEnvWithCustomLogger", (_LOGGER, callback), (POINTER, None), (c.c_int, 0), (c.c_char_p, b"x"))


def memory_info(arena: bool) -> object:
    """The CPU's memory, through its arena or not."""
    return made("CreateMemoryInfo", (c.c_char_p, b"Cpu"), (c.c_int, int(arena)), (c.c_int, 0), (c.c_int, 0))


def statistics(allocator: object) -> dict[str, int]:
    """``GetStats`` of an arena."""
    pairs = made("AllocatorGetStats", (POINTER, allocator))
    keys, values, count = c.POINTER(c.c_char_p)(), c.POINTER(c.c_char_p)(), c.c_size_t()
    strings, size = c.POINTER(c.POINTER(c.c_char_p)), c.POINTER(c.c_size_t)
    get = function("GetKeyValuePairs", POINTER, strings, strings, size, result=None)
    get(pairs, c.byref(keys), c.byref(values), c.byref(count))
    found = {keys[i].decode(): int(values[i]) for i in range(count.value)}
    function("ReleaseKeyValuePairs", POINTER, result=None)(pairs)
    return found
