"""The CUDA driver's library where there is none: extensions that are linked against it can be loaded.

A library of kernels names ``libcuda.so.1`` as needed, and functions of it (``cu...``), so the loader refuses it on a
machine without a driver; on a card's machine it is loaded, and its operators are there. Once that fails, a library of
this name is written that has those functions, each of which says that there is no device, and it is tried again. A
capture calls none of the kernels. ELF, by the System V ABI, is written here: no compiler is asked.
"""

from __future__ import annotations

import _imp
import ctypes
import platform
import re
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from graphmem.capture.patches import Patches

_NAME = "libcuda.so.1"
#: What the loader says of a library that is not there, and of a function that a library of that name lacks.
_LACKS = re.compile(rf"{re.escape(_NAME)}: cannot open|undefined symbol: (?:cu[A-Z]\w+)")
#: A function of the driver: ``cuMemMap``, not ``cublasCreate`` or ``cudaMalloc``.
_FUNCTION = re.compile(rb"(?<=\0)cu[A-Z][A-Za-z0-9_]+(?=\0)")
_NO_DEVICE = 100
#: ELF's number of a machine, and a function of it that returns :data:`_NO_DEVICE`.
_MACHINES = {
    "x86_64": (62, b"\xb8" + struct.pack("<I", _NO_DEVICE) + b"\xc3"),  # mov eax, 100; ret
    "aarch64": (183, struct.pack("<II", 0x52800000 | _NO_DEVICE << 5, 0xD65F03C0)),  # mov w0, #100; ret
}


def patch_driver_library(patches: Patches) -> None:
    """Load extensions, and libraries by ctypes, that need the driver's."""
    patches.around(_imp, {"create_dynamic": lambda load, spec, *more: _loaded(load, spec.origin, spec, *more)})
    patches.around(ctypes, {"_dlopen": lambda load, name, *more: _loaded(load, name, name, *more)})


def _loaded(load: Callable[..., Any], file: object, *args: object) -> Any:
    try:
        return load(*args)
    except (ImportError, OSError) as error:
        path = Path(file) if isinstance(file, str) else None
        if not _LACKS.search(str(error)) or path is None or not path.is_file():
            raise
        names = driver_functions(path.read_bytes())
        machine = platform.machine()
        if not names or machine not in _MACHINES:
            raise
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder, _NAME)
        stand_in.write_bytes(inert_library(names, machine))
        ctypes.CDLL(str(stand_in), ctypes.RTLD_GLOBAL)  # it stays: what was loaded with it does too
    return load(*args)


def driver_functions(library: bytes) -> list[str]:
    """The functions of the driver that a library names; none where it cannot be read."""
    try:
        names = _names(library)
    except struct.error:
        return []
    return sorted({name.decode() for name in _FUNCTION.findall(names)})


def _names(library: bytes) -> bytes:
    """Its table of names (``DT_STRTAB``). Raises ``struct.error`` where it is cut off."""
    if library[:6] != b"\x7fELF\x02\x01":
        return b""
    (at,), (size, count) = struct.unpack_from("<Q", library, 32), struct.unpack_from("<HH", library, 54)
    headers = [struct.unpack_from("<IIQQQQ", library, at + number * size) for number in range(count)]
    found: dict[int, int] = {}
    for kind, _, start, _, _, length in headers:
        if kind == _PT_DYNAMIC:
            found.update(struct.iter_unpack("<QQ", library[start : start + length]))
    table = found.get(_DT_STRTAB, -1)
    for kind, _, start, address, _, length in headers:
        if kind == _PT_LOAD and address <= table < address + length:
            return library[table - address + start :][: found.get(_DT_STRSZ, 0)]
    return b""


_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 4, 5, 6, 10, 11, 14
_HEADER_BYTES, _SEGMENT_BYTES, _SYMBOL_BYTES, _PAGE = 64, 56, 24, 1 << 16
_SEGMENTS = 4


def inert_library(names: Iterable[str], machine: str) -> bytes:
    """A shared library with these functions. Two segments: all that is read and run, then the table that the loader
    writes into."""
    number, code = _MACHINES[machine]
    strings, symbols = b"\0", b"\0" * _SYMBOL_BYTES
    code_at = _HEADER_BYTES + _SEGMENTS * _SEGMENT_BYTES
    for name in names:  # st_name, a global function, everywhere visible, of some section, st_value, st_size
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 1, code_at, len(code))
        strings += name.encode() + b"\0"
    soname = len(strings)
    strings += _NAME.encode() + b"\0"
    count = len(symbols) // _SYMBOL_BYTES
    # One bucket, whose chain has every symbol.
    chain = struct.pack(f"<{count + 3}I", 1, count, count - 1, *(max(0, index - 1) for index in range(count)))
    symbols_at = -(-(code_at + len(code)) // 8) * 8
    chain_at = symbols_at + len(symbols)
    strings_at = chain_at + len(chain)
    dynamic_at = -(-(strings_at + len(strings)) // _PAGE) * _PAGE
    entries = {
        _DT_SONAME: soname, _DT_HASH: chain_at, _DT_STRTAB: strings_at, _DT_SYMTAB: symbols_at,
        _DT_STRSZ: len(strings), _DT_SYMENT: _SYMBOL_BYTES, 0: 0,
    }  # fmt: skip
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries.items())
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQI", 3, number, 1, 0, _HEADER_BYTES, 0, 0)
    header += struct.pack("<HHHHHH", _HEADER_BYTES, _SEGMENT_BYTES, _SEGMENTS, 0, 0, 0)
    read = strings_at + len(strings)
    header += b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)
        for kind, flags, at, size, align in (
            (_PT_LOAD, 5, 0, read, _PAGE),
            (_PT_LOAD, 6, dynamic_at, len(dynamic), _PAGE),
            (_PT_DYNAMIC, 6, dynamic_at, len(dynamic), 8),
            (_PT_GNU_STACK, 6, 0, 0, 16),  # not to be run
        )
    )
    body = (header + code).ljust(symbols_at, b"\0") + symbols + chain + strings
    return body.ljust(dynamic_at, b"\0") + dynamic
