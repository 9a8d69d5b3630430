"""The files of ``torch.save``: zip archives of a fixed shape, written with holes where values are unknown.

Layout (caffe2/serialize/inline_container.cc and its miniz, PyTorch 2.6 to 2.13, seen in files of the real writer): one
stored entry a record; its data begin at a multiple of the alignment, to which an extra field ``FB`` pads the local
header; sizes and checksum follow the data in a descriptor; the directory at the end always has its zip64 form too.

A record without values takes its full size in the archive and no room on the disk. It is told from one of zeros by
:data:`HOLLOW` in the directory, in a field that readers leave alone, so the file is as long as PyTorch's own.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from graphmem.units import MIB

#: "Internal file attributes" of a record without values: of its bits only the lowest three have a meaning.
HOLLOW = 0x4748
#: Zeros that a stream which is no plain file is given in full; beyond, a record's zeros are deflated (1000 to 1).
IN_FULL = 256 * MIB

_CHUNK = bytes(MIB)
_MOST = 0xFFFFFFFF
_IS_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8
_STORED, _DEFLATED = 0, 8


# --- runs of zeros ----------------------------------------------------------------------------------------------------


def is_plain_file(stream: Any) -> bool:
    """Whether what is written to a stream stands unchanged in a file of the disk (``NamedTemporaryFile`` too)."""
    stream = getattr(stream, "file", stream) if type(stream).__module__ == "tempfile" else stream
    raw: object = stream.raw if type(stream) in (io.BufferedWriter, io.BufferedRandom) else stream
    return type(raw) is io.FileIO and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def write_zeros(stream: BinaryIO, count: int) -> None:
    """Let ``count`` zeros follow: as a hole in a plain file, else as bytes."""
    if is_plain_file(stream):
        stream.flush()
        start, size = stream.tell(), os.fstat(stream.fileno()).st_size
        if start >= size:
            stream.truncate(start + count)
            stream.seek(start + count)
            return
    for left in range(count, 0, -len(_CHUNK)):  # also over what a file had there
        stream.write(_CHUNK[:left])


def keeping_holes(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``shutil._fastcopy_sendfile(source, target)``, by which Linux's Python copies files, keeping the holes."""

    def copy(source: Any, target: Any) -> None:
        status, end = os.fstat(source.fileno()), 0
        if status.st_blocks * 512 >= status.st_size or not stat.S_ISREG(os.fstat(target.fileno()).st_mode):
            original(source, target)
            return
        while True:
            try:
                start = os.lseek(source.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole follows
                break
            end = os.lseek(source.fileno(), start, os.SEEK_HOLE)
            source.seek(start)
            target.seek(start)
            for left in range(end - start, 0, -len(_CHUNK)):
                target.write(source.read(min(left, len(_CHUNK))))
        target.truncate(status.st_size)

    return copy


def checksum_of_zeros(count: int) -> int:
    """CRC-32 of so many zeros: the register before them, times x to the power of their bits."""
    power, square = 1 << 31, 1 << 23  # x**0 and x**8: bits are reflected
    while count:
        if count & 1:
            power = _product(power, square)
        square, count = _product(square, square), count >> 1
    return _product(power, _MOST) ^ _MOST


def _product(a: int, b: int) -> int:
    """Of two polynomials, modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


def deflated_zeros(count: int) -> bytes:
    """A deflate stream of so many zeros. Blocks that need nothing before them can be repeated."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = compressor.compress(_CHUNK) + compressor.flush(zlib.Z_FULL_FLUSH)
    return block * (count // MIB) + compressor.compress(_CHUNK[: count % MIB]) + compressor.flush()


# --- the archive ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """An entry of the directory; sizes and offset in bytes."""

    name: bytes
    offset: int
    method: int
    stored: int
    size: int
    checksum: int
    is_hollow: bool

    @property
    def is_long(self) -> bool:
        return self.size >= _MOST or self.offset >= _MOST

    def zip64(self, stored: int) -> bytes:
        """The extra field for what does not fit into 32 bits."""
        fields = [self.size, stored] if self.size >= _MOST else []
        if self.offset >= _MOST:
            fields.append(self.offset)
        return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""

    def header(self, alignment: int) -> bytes:
        """The local header; the data that follow are aligned."""
        extra = self.zip64(0)
        fill = -(self.offset + 30 + len(self.name) + len(extra) + 4) % alignment
        extra += struct.pack("<2sH", b"FB", fill) + b"Z" * fill
        return struct.pack(
            "<4s5H3I2H", b"PK\3\4", 0, self._flags, self.method, 0, 0, 0, 0, 0, len(self.name), len(extra)
        ) + self.name + extra  # fmt: skip

    def descriptor(self) -> bytes:
        if not self.size:
            return b""
        return struct.pack(
            "<4sIQQ" if self.is_long else "<4sIII", b"PK\7\10", self.checksum, self.stored, self.size
        )  # fmt: skip

    def entry(self) -> bytes:
        extra = self.zip64(self.stored)
        stored, size = (_MOST, _MOST) if self.size >= _MOST else (self.stored, self.size)
        attributes = HOLLOW if self.is_hollow else 0
        return struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, self._flags, self.method, 0, 0, self.checksum, stored, size, len(self.name),
            len(extra), 0, 0, attributes, 0, min(self.offset, _MOST),
        ) + self.name + extra  # fmt: skip

    @property
    def _flags(self) -> int:
        return _IS_UTF8 | (_HAS_DESCRIPTOR if self.size else 0)


class ArchiveWriter:
    """Stands for ``torch._C.PyTorchFileWriter``: writes an archive to a stream, or to an open file called ``name``, and
    closes that with it."""

    def __init__(self, stream: BinaryIO, name: str | None = None, alignment: int = 64) -> None:
        self._stream, self._closes = stream, name is not None
        self._folder = _stem(name) if name is not None else "archive"
        self._alignment = alignment
        self._at = 0
        self._records: list[_Record] = []
        self._left = IN_FULL
        self._id = ""

    def archive_name(self) -> str:
        return self._folder

    def get_all_written_records(self) -> set[str]:
        return {record.name.decode().partition("/")[2] for record in self._records}

    def serialization_id(self) -> str:
        """Of the records so far, by names and checksums, as PyTorch's is; of an archive that is closed, its own."""
        if self._id:
            return self._id
        sums = (zlib.crc32(b"".join(record.name for record in self._records)), *(r.checksum for r in self._records))
        return f"{sums[0]:020d}{zlib.crc32(struct.pack(f'<{len(sums)}I', *sums)):020d}"

    def write_record(self, name: str, data: Any, size: int) -> None:
        """``data``: text, bytes, or None for zeros that stand for unknown values."""
        if data is None:
            self._write_hollow(name, size)
            return
        content = memoryview(data.encode() if isinstance(data, str) else data).cast("B")[:size]
        self._add(name, _STORED, size, size, zlib.crc32(content), lambda: self._stream.write(content))

    def write_record_metadata(self, name: str, size: int) -> None:
        self._write_hollow(name, size)

    def _write_hollow(self, name: str, size: int) -> None:
        checksum = checksum_of_zeros(size)
        if is_plain_file(self._stream) or size <= self._left:
            self._left -= 0 if is_plain_file(self._stream) else size
            zeros = lambda: write_zeros(self._stream, size)  # noqa: E731
            self._add(name, _STORED, size, size, checksum, zeros, is_hollow=True)
        else:
            data = deflated_zeros(size)
            write = lambda: self._stream.write(data)  # noqa: E731
            self._add(name, _DEFLATED, len(data), size, checksum, write, is_hollow=True)

    def _add(
        self, name: str, method: int, stored: int, size: int, checksum: int, write: Any, is_hollow: bool = False
    ) -> None:
        record = _Record(f"{self._folder}/{name}".encode(), self._at, method, stored, size, checksum, is_hollow)
        header, descriptor = record.header(self._alignment), record.descriptor()
        self._stream.write(header)
        if size:
            write()
            self._stream.write(descriptor)
        self._at += len(header) + stored + len(descriptor)
        self._records.append(record)

    def write_end_of_file(self) -> None:
        self.write_record("version", "3\n", 2)
        self._id = self.serialization_id()
        self.write_record(".data/serialization_id", self._id, 40)
        directory, count = b"".join(record.entry() for record in self._records), len(self._records)
        end = self._at + len(directory)
        self._stream.write(
            directory
            + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, len(directory), self._at)
            + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
            + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF),
                          min(len(directory), _MOST), min(self._at, _MOST), 0)
        )  # fmt: skip
        if self._closes:
            self._stream.close()


def _stem(name: str) -> str:
    """The folder in an archive of this file: its name up to the last dot."""
    name = name.replace("\\", "/").rpartition("/")[2]
    return name.rpartition(".")[0] if "." in name else name
