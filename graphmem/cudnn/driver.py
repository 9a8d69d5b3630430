"""A shared library that stands for the CUDA driver where none is installed, written byte by byte.

cuDNN lists the engines that compile their kernels at run time only where ``libcuda.so.1`` can be loaded and has every
function that cuDNN looks up. On the card they exist, so planning without a driver must not lose them. The stand-in has
the names and nothing else: each function returns ``CUDA_ERROR_NO_DEVICE``. It lives in the worker's memory alone.

The format is ELF (System V ABI, chapters 4 and 5): one segment with the tables, one with the code.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

NAME = "libcuda.so.1"
#: Machine: (its number in ELF, code that returns CUDA_ERROR_NO_DEVICE, which is 100).
_MACHINES = {
    "x86_64": (62, bytes.fromhex("b864000000c3")),  # mov eax, 100; ret
    "aarch64": (183, struct.pack("<II", 0x52800C80, 0xD65F03C0)),  # mov w0, #100; ret
}
#: The largest page of these machines: segments with different rights do not share one.
_PAGE = 0x10000
_HEADER, _PROGRAM_HEADER, _SYMBOL = 64, 56, 24
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_READ_WRITE, _READ_EXECUTE = 6, 5
_GLOBAL_FUNCTION = 0x12
_NAMES = re.compile(rb"\x00(cu[A-Z][A-Za-z0-9_]*)(?=\x00)")


def load_driver(sources: Iterable[Path]) -> str:
    """Load the driver, or a stand-in with the functions that the libraries ``sources`` name.

    Returns ``installed``, ``stand-in``, or ``missing`` where there is no stand-in for this machine.
    """
    try:
        ctypes.CDLL(NAME)
        return "installed"
    except OSError:
        pass
    if platform.machine() not in _MACHINES:
        return "missing"
    names = sorted({name for source in sources for name in _NAMES.findall(source.read_bytes())})
    file = os.memfd_create(NAME)
    try:
        os.write(file, shared_library(names, platform.machine()))
        ctypes.CDLL(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return "stand-in"


def shared_library(names: Sequence[bytes], machine: str) -> bytes:
    """An ELF file named ``libcuda.so.1`` whose functions all are the same few instructions."""
    number, code = _MACHINES[machine]
    strings, offsets = _strings(names)
    symbols = bytes(_SYMBOL) + b"".join(
        struct.pack("<IBBHQQ", offset, _GLOBAL_FUNCTION, 0, 1, _text_at(names, strings), len(code))
        for offset in offsets
    )
    count = len(names) + 1
    chains = [0, *(index + 1 if index + 1 < count else 0 for index in range(1, count))]
    table = struct.pack(f"<{3 + count}I", 1, count, min(1, len(names)), *chains)
    at = _layout(len(symbols), len(table), len(strings))
    dynamic = struct.pack(
        "<14Q", 4, at["hash"], 5, at["strings"], 6, at["symbols"], 10, len(strings), 11, _SYMBOL, 14, 1, 0, 0
    )
    headers = [
        (_LOAD, _READ_WRITE, 0, at["end"]),
        (_LOAD, _READ_EXECUTE, at["text"], len(code)),
        (_DYNAMIC, _READ_WRITE, at["dynamic"], len(dynamic)),
        (_STACK, _READ_WRITE, 0, 0),
    ]
    image = bytearray(at["text"] + len(code))
    image[:_HEADER] = _elf_header(number, len(headers))
    for index, header in enumerate(headers):
        start = _HEADER + index * _PROGRAM_HEADER
        image[start : start + _PROGRAM_HEADER] = _program_header(*header)
    parts = (("symbols", symbols), ("hash", table), ("strings", strings), ("dynamic", dynamic), ("text", code))
    for name, part in parts:
        image[at[name] : at[name] + len(part)] = part
    return bytes(image)


def _strings(names: Sequence[bytes]) -> tuple[bytes, list[int]]:
    """The string table, which begins with the library's own name at 1, and where each name stands in it."""
    table = bytearray(b"\0" + NAME.encode() + b"\0")
    offsets = []
    for name in names:
        offsets.append(len(table))
        table += name + b"\0"
    return bytes(table), offsets


def _layout(symbols: int, table: int, strings: int) -> dict[str, int]:
    at = {"symbols": _HEADER + 4 * _PROGRAM_HEADER}
    at["hash"] = at["symbols"] + symbols
    at["dynamic"] = -(-(at["hash"] + table) // 8) * 8
    at["strings"] = at["dynamic"] + 14 * 8
    at["end"] = at["strings"] + strings
    at["text"] = -(-at["end"] // _PAGE) * _PAGE
    return at


def _text_at(names: Sequence[bytes], strings: bytes) -> int:
    count = len(names) + 1
    return _layout(count * _SYMBOL, (3 + count) * 4, len(strings))["text"]


def _elf_header(machine: int, programs: int) -> bytes:
    identity = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bits, little endian, version 1
    shared_object = 3
    return identity + struct.pack(
        "<HHIQQQIHHHHHH", shared_object, machine, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM_HEADER, programs, 64, 0, 0
    )


def _program_header(kind: int, rights: int, start: int, size: int) -> bytes:
    alignment = _PAGE if kind == _LOAD else 8
    return struct.pack("<IIQQQQQQ", kind, rights, start, start, start, size, size, alignment)
