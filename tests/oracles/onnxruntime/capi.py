"""The C API of the installed onnxruntime through ctypes: sessions, arenas, statistics, allocators of our own.

The wheel ships ``capi/libonnxruntime.so``, whose table of functions only ever grows, so the slots below stay valid
(checked with 1.31.1). Only what the recordings need is here.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTER = c.c_void_p
API_VERSION = 24
SLOTS = {
    "GetErrorMessage": 2, "CreateEnvWithCustomLogger": 4, "CreateSession": 7, "Run": 9, "CreateSessionOptions": 10,
    "EnableMemPattern": 16, "DisableMemPattern": 17, "SetSessionGraphOptimizationLevel": 23,
    "SetIntraOpNumThreads": 24, "CreateRunOptions": 39, "CreateTensorWithDataAsOrtValue": 49, "CreateMemoryInfo": 68,
    "ReleaseStatus": 93, "ReleaseValue": 96, "AddSessionConfigEntry": 130, "CreateAllocator": 131,
    "CreateAndRegisterAllocator": 144, "CreateArenaCfgV2": 164, "AddRunConfigEntry": 165, "RegisterAllocator": 176,
    "GetKeyValuePairs": 298, "ReleaseKeyValuePairs": 300, "AllocatorGetStats": 319,
}  # fmt: skip


class _Base(c.Structure):
    _fields_ = (
        ("GetApi", c.CFUNCTYPE(POINTER, c.c_uint32)),
        ("GetVersionString", c.CFUNCTYPE(c.c_char_p)),
    )


def _load() -> tuple[Any, str]:
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    library = c.CDLL(str(sorted((Path(spec.origin).parent / "capi").glob("libonnxruntime.so*"))[-1]))
    library.OrtGetApiBase.restype = c.POINTER(_Base)
    base = library.OrtGetApiBase().contents
    return c.cast(base.GetApi(API_VERSION), c.POINTER(POINTER)), base.GetVersionString().decode()


TABLE, VERSION = _load()


class OrtError(RuntimeError):
    """What ONNX Runtime said."""


def function(name: str, *types: Any, result: Any = POINTER) -> Callable[..., Any]:
    """The function in the slot of ``name``."""
    return c.CFUNCTYPE(result, *types)(TABLE[SLOTS[name]])


_message = function("GetErrorMessage", POINTER, result=c.c_char_p)
_release_status = function("ReleaseStatus", POINTER, result=None)


def check(status: Any) -> None:
    """Raise :class:`OrtError` unless the status is null."""
    if status:
        text = _message(status).decode(errors="replace")
        _release_status(status)
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
_kept: list[Any] = []


def environment(sink: Callable[[str], None] | None = None) -> Any:
    """An environment whose log lines, all of them, go to ``sink``."""

    def log(_: Any, severity: int, category: bytes, identifier: bytes, where: bytes, text: bytes) -> None:
        if sink is not None:
            sink(text.decode(errors="replace"))

    callback = _LOGGER(log)
    _kept.append(callback)
    return made("CreateEnvWithCustomLogger", (_LOGGER, callback), (POINTER, None), (c.c_int, 0), (c.c_char_p, b"x"))


def memory_info(arena: bool) -> Any:
    """The CPU's memory, through its arena or not."""
    return made("CreateMemoryInfo", (c.c_char_p, b"Cpu"), (c.c_int, int(arena)), (c.c_int, 0), (c.c_int, 0))


def register_arena(env: Any, info: Any, config: dict[str, int]) -> None:
    """Give the environment an arena of this configuration, for sessions with ``session.use_env_allocators``."""
    keys = (c.c_char_p * len(config))(*(key.encode() for key in config))
    values = (c.c_size_t * len(config))(*config.values())
    arena = made(
        "CreateArenaCfgV2", (c.POINTER(c.c_char_p), keys), (c.POINTER(c.c_size_t), values), (c.c_size_t, len(config))
    )
    call("CreateAndRegisterAllocator", (POINTER, env), (POINTER, info), (POINTER, arena))


def statistics(allocator: Any) -> dict[str, int]:
    """``GetStats`` of an arena."""
    pairs = made("AllocatorGetStats", (POINTER, allocator))
    keys, values, count = c.POINTER(c.c_char_p)(), c.POINTER(c.c_char_p)(), c.c_size_t()
    strings, size = c.POINTER(c.POINTER(c.c_char_p)), c.POINTER(c.c_size_t)
    get = function("GetKeyValuePairs", POINTER, strings, strings, size, result=None)
    get(pairs, c.byref(keys), c.byref(values), c.byref(count))
    found = {keys[i].decode(): int(values[i]) for i in range(count.value)}
    function("ReleaseKeyValuePairs", POINTER, result=None)(pairs)
    return found


class _Allocator(c.Structure):
    pass


_ALLOC = c.CFUNCTYPE(POINTER, c.POINTER(_Allocator), c.c_size_t)
_FREE = c.CFUNCTYPE(None, c.POINTER(_Allocator), POINTER)
_INFO = c.CFUNCTYPE(POINTER, c.POINTER(_Allocator))
_Allocator._fields_ = (
    ("version", c.c_uint32), ("Alloc", _ALLOC), ("Free", _FREE), ("Info", _INFO), ("Reserve", _ALLOC),
    ("GetStats", POINTER), ("AllocOnStream", POINTER), ("Shrink", POINTER),
)  # fmt: skip
ALIGNMENT_BYTES = 256


def register_tracer(env: Any, note: Callable[[str, int, int], None]) -> None:
    """Give the environment an allocator that tells ``note`` (alloc, reserve or free; bytes; number of the block)."""
    libc = c.CDLL(None)
    libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = POINTER, (c.c_size_t, c.c_size_t)
    libc.free.argtypes = (POINTER,)
    numbers: dict[int, int] = {}
    counter = [0]

    def allocate(kind: str) -> Callable[[Any, int], int | None]:
        def make(_: Any, size: int) -> int | None:
            if not size:
                return None
            address = libc.aligned_alloc(ALIGNMENT_BYTES, -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
            counter[0] += 1
            numbers[address] = counter[0]
            note(kind, size, counter[0])
            return int(address)

        return make

    def free(_: Any, address: int | None) -> None:
        if address:
            note("free", 0, numbers.pop(address))
            libc.free(address)

    info = memory_info(False)
    allocator = _Allocator()
    allocator.version = 18
    allocator.Alloc, allocator.Reserve = _ALLOC(allocate("alloc")), _ALLOC(allocate("reserve"))
    allocator.Free, allocator.Info = _FREE(free), _INFO(lambda _: info.value)
    _kept.extend((allocator, info))
    call("RegisterAllocator", (POINTER, env), (POINTER, c.cast(c.pointer(allocator), POINTER)))
