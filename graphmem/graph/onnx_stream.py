"""Read an ONNX file without its weights.

An ONNX file is one protobuf message, and nearly all of it is ``TensorProto`` payloads. This walker copies every field
but those: it seeks over them, so neither time nor memory grows with the weights, and files beyond protobuf's 2 GiB
limit are read like any other. Instead the ``doc_string`` of a tensor is the place of the first payload that is equal
to its own. Field numbers: ``onnx/onnx.proto`` (IR version 13).
"""

from __future__ import annotations

import io
import re
from functools import cache
from typing import BinaryIO

from graphmem.base.records import dataclass

KEPT_PAYLOAD_BYTES = 1024  # a payload up to this size may be a shape, axes or indices that shape inference needs
MAX_DEPTH = 64  # protobuf itself refuses messages nested deeper than 100

_PAYLOAD = "payload"
_DROP = "drop"
#: message -> field number -> what it holds; every field not named is copied as it is
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: _DROP, 25: "function"},  # 20 is training_info: a second graph that inference never runs
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {4: _PAYLOAD, 5: _PAYLOAD, 6: _PAYLOAD, 7: _PAYLOAD, 9: _PAYLOAD, 10: _PAYLOAD, 11: _PAYLOAD, 12: _DROP},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DOC_STRING = bytes((12 << 3 | _BYTES,))
#: Payloads whose ends are alike are compared: with so many others of their length, and so many bytes of a file in all.
MOST_COMPARED, MOST_COMPARED_BYTES = 4, 1 << 28
_END_BYTES = 64
#: Keys (field number, wire type) of ModelProto: what the bytes of another kind of file are unlikely to begin with.
_MODEL_KEYS = frozenset(
    number << 3 | (_VARINT if number in (1, 5) else _BYTES) for number in (1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26)
)


class MalformedError(ValueError):
    """The bytes are not such a message. ``looks_like_onnx`` is whether they begin as a model does."""

    looks_like_onnx = False


@dataclass
class _Reader:
    file: BinaryIO
    position: int = 0
    compared: int = 0  # bytes

    def __post_init__(self) -> None:
        self.payloads: dict[tuple[int, bytes], list[int]] = {}  # where those of a length with such ends begin

    def take(self, count: int, end: int) -> bytes:
        data = self.file.read(self._checked(count, end))
        if len(data) != count:
            raise MalformedError(f"it ends at byte {self.position + len(data)}")
        self.position += count
        return data

    def skip(self, count: int, end: int) -> None:
        self.file.seek(self._checked(count, end), io.SEEK_CUR)
        self.position += count

    def skip_payload(self, length: int, end: int) -> int:
        """Skip so many bytes, and return where the first ones in the file begin that are equal to them."""
        begin = self.position
        self.skip(length, end)
        ends = b"".join(self._read(start, min(length, _END_BYTES)) for start in (begin, self.position - _END_BYTES))
        alike = self.payloads.setdefault((length, ends), [])
        found = next((other for other in alike[:MOST_COMPARED] if self._are_equal(begin, other, length)), begin)
        if found == begin:
            alike.append(begin)
        self.file.seek(self.position)
        return found

    def _read(self, start: int, count: int) -> bytes:
        self.file.seek(start)
        return self.file.read(count)

    def _are_equal(self, begin: int, other: int, length: int) -> bool:
        for start in range(0, length, _CHUNK):
            count = min(_CHUNK, length - start)
            self.compared += count
            if (
                self._read(begin + start, count) != self._read(other + start, count)
                or self.compared > MOST_COMPARED_BYTES
            ):
                return False
        return True

    def run(self, key: bytes, wire: int, end: int) -> bytes:
        """Read a run of equal small fields, as a tree ensemble has: its bytes, often none."""
        pattern, out = _run_pattern(key, wire), bytearray()
        while True:
            chunk = self.file.read(min(_CHUNK, end - self.position))
            match = pattern.match(chunk)
            length = match.end() if match else 0
            self.file.seek(length - len(chunk), io.SEEK_CUR)
            self.position += length
            out += chunk[:length]
            if length < _CHUNK // 2:
                return bytes(out)

    def _checked(self, count: int, end: int) -> int:
        if count > end - self.position:
            raise MalformedError(f"a field at byte {self.position} wants {count} bytes, {end - self.position} are left")
        return count

    def varint(self, end: int) -> tuple[int, bytes]:
        """A varint and the bytes it was written with."""
        value, raw = 0, b""
        while True:
            byte = self.take(1, end)
            value |= (byte[0] & 0x7F) << (7 * len(raw))
            raw += byte
            if byte[0] < 0x80:
                return value, raw
            if len(raw) == 10:
                raise MalformedError(f"a number at byte {self.position} does not end")


_CHUNK = 1 << 16


@cache
def _run_pattern(key: bytes, wire: int) -> re.Pattern[bytes]:
    """Fields of one key: numbers, or strings of less than 128 bytes."""
    content = {
        _VARINT: b"[\x80-\xff]{0,9}[\x00-\x7f]",
        _FIXED32: b".{4}",
        _FIXED64: b".{8}",
        _BYTES: b"(?:" + b"|".join(re.escape(bytes((n,))) + b".{%d}" % n for n in range(128)) + b")",
    }[wire]
    return re.compile(b"(?:" + re.escape(key) + content + b")*", re.DOTALL)


def strip_weights(file: BinaryIO, size: int) -> bytes:
    """The ONNX model of ``size`` bytes at the start of the seekable ``file``, without payloads over 1 KiB.

    Raises :class:`MalformedError`.
    """
    reader = _Reader(file)
    if size and reader.varint(size)[0] not in _MODEL_KEYS:
        raise MalformedError("its first field is none of a model's")
    reader.skip(-reader.position, size)
    try:
        return _message(reader, size, "model", 0)
    except MalformedError as error:
        error.looks_like_onnx = True
        raise


def _message(reader: _Reader, end: int, kind: str, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise MalformedError(f"messages are nested deeper than {MAX_DEPTH}")
    out = bytearray()
    fields = _FIELDS[kind]
    before = b""
    while reader.position < end:
        key, raw_key = reader.varint(end)
        if key >> 3 == 0:
            raise MalformedError(f"byte {reader.position} has the field number 0")
        field = fields.get(key >> 3, "")
        _field(reader, end, field, key & 7, raw_key, out, depth)
        if kind == "attribute" and raw_key == before and not field:
            out += reader.run(raw_key, key & 7, end)
        before = raw_key
    return bytes(out)


def _field(reader: _Reader, end: int, kind: str, wire: int, raw_key: bytes, out: bytearray, depth: int) -> None:
    """Copy one field of a message from ``reader`` to the end of ``out``, large payloads as a number that stands for
    them. Raises :class:`MalformedError`."""
    if wire == _VARINT:
        _, raw = reader.varint(end)
        out += raw_key + raw
    elif wire in (_FIXED64, _FIXED32):
        out += raw_key + reader.take(8 if wire == _FIXED64 else 4, end)
    elif wire == _BYTES:
        length, raw = reader.varint(end)
        if kind == _DROP:
            reader.skip(length, end)
        elif kind == _PAYLOAD and length > KEPT_PAYLOAD_BYTES:
            token = str(reader.skip_payload(length, end)).encode()
            out += _DOC_STRING + _varint_bytes(len(token)) + token
        elif kind in _FIELDS and length > KEPT_PAYLOAD_BYTES:  # nothing in a smaller one is worth a visit
            child = _message(reader, _child_end(reader, length, end), kind, depth + 1)
            out += raw_key + _varint_bytes(len(child)) + child
        else:
            out += raw_key + raw + reader.take(length, end)
    else:
        raise MalformedError(f"byte {reader.position} has the unknown wire type {wire}")


def _child_end(reader: _Reader, length: int, end: int) -> int:
    if reader.position + length > end:
        raise MalformedError(
            f"a field at byte {reader.position} wants {length} bytes, {end - reader.position} are left"
        )
    return reader.position + length


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
