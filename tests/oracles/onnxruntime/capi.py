"""What the recordings need of ONNX Runtime's C API beyond :mod:`graphmem.accuracy.onnxruntime.capi`: arenas as
configured, and allocators of our own."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

from graphmem.accuracy.onnxruntime.capi import POINTER, call, kept, made, memory_info


def register_arena(env: Any, info: Any, config: dict[str, int]) -> None:
    """Give the environment an arena of this configuration, for sessions with ``session.use_env_allocators``."""
    keys = (c.c_char_p * len(config))(*(key.encode() for key in config))
    values = (c.c_size_t * len(config))(*config.values())
    arena = made(
        "CreateArenaCfgV2", (c.POINTER(c.c_char_p), keys), (c.POINTER(c.c_size_t), values), (c.c_size_t, len(config))
    )
    call("CreateAndRegisterAllocator", (POINTER, env), (POINTER, info), (POINTER, arena))


class Allocator(c.Structure):
    """The head of ``OrtAllocator`` (onnxruntime_c_api.h)."""


_ALLOC = c.CFUNCTYPE(POINTER, c.POINTER(Allocator), c.c_size_t)
_FREE = c.CFUNCTYPE(None, c.POINTER(Allocator), POINTER)
_INFO = c.CFUNCTYPE(POINTER, c.POINTER(Allocator))
Allocator._fields_ = (
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
    allocator = Allocator()
    allocator.version = 18
    allocator.Alloc, allocator.Reserve = _ALLOC(allocate("alloc")), _ALLOC(allocate("reserve"))
    allocator.Free, allocator.Info = _FREE(free), _INFO(lambda _: info.value)
    kept.extend((allocator, info))
    call("RegisterAllocator", (POINTER, env), (POINTER, c.cast(c.pointer(allocator), POINTER)))
