"""GGUF files: their headers, never their data (https://github.com/ggml-org/ggml, docs/gguf.md; versions 2, 3).

A header is somebody else's: every count and length is held against a limit before it is used, arrays that no estimate
needs (a tokenizer's words) are passed over, and sizes are sums, so that no number in it makes memory or time grow.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from graphmem.base.documents import open_file, shown
from graphmem.errors import SourceError, reading
from graphmem.sources.checkpoints import Checkpoint

#: (name, elements of a block, bytes of a block) by number: ``enum ggml_type`` (ggml/include/ggml.h) and the blocks of
#: ggml/src/ggml-common.h.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_K", 256, 84), 11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144), 13: ("q5_K", 256, 176), 14: ("q6_K", 256, 210), 15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
}  # fmt: skip
#: Bytes of an element of a block, by the types' names.
BY_NAME = {name: (elements, size) for name, elements, size in TYPES.values()}
#: ``struct`` formats of values by number (``enum gguf_type``); 8 is text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
#: The most of each: entries, tensors, bytes of a name, of a text, elements of an array, of one that is kept.
_MOST_ENTRIES, _MOST_TENSORS, _LONGEST_NAME, _LONGEST_TEXT = 1 << 16, 1 << 16, 1 << 10, 1 << 24
_MOST_ELEMENTS, _MOST_KEPT = 1 << 22, 1 << 12
#: Elements of a tensor, and parts of a split file.
_MOST_SIZE, _MOST_PARTS = 1 << 50, 1_000
#: Text that is kept: templates of chats are longer, and nobody asks for them.
_KEPT_TEXT = 1 << 10
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, its sizes (the fastest first), its type's name and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    bytes: int


@dataclass(frozen=True)
class GGUF(Checkpoint):
    """A checkpoint of GGUF files with its metadata: numbers, short texts, and short arrays of numbers."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    layout: tuple[Tensor, ...] = ()


def read(path: Path) -> GGUF:
    """The headers of a GGUF file, and of its other parts where it is split. Raises :class:`SourceError`."""
    metadata: dict[str, Any] = {}
    layout: list[Tensor] = []
    for part in _parts(path):
        found, tensors = _read_one(part)
        metadata = found | metadata
        layout += tensors
    sizes = {tensor.name: tensor.bytes for tensor in layout}
    return GGUF(sizes, metadata=metadata, layout=tuple(layout))


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.search(path.name)
    if match is None:
        return [path]
    count = int(match[2])
    if not 1 <= count <= _MOST_PARTS:
        raise SourceError(f"{path} says that it is one of {count} parts; accepted: 1 to {_MOST_PARTS}")
    stem = path.name[: match.start()]
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _read_one(path: Path) -> tuple[dict[str, object], list[Tensor]]:
    try:
        with reading(path), open_file(path) as file:
            return _header(_Reader(file))
    except ValueError as error:
        raise SourceError(f"{path} is no GGUF file that is understood: {error}") from None


class _Reader:
    """Little-endian values, one after another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def bytes(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) < count:
            raise ValueError("its header is cut off")
        return found

    def skip(self, count: int) -> None:
        while count > 0:  # reading, so that the end of the file is seen
            step = min(count, 1 << 20)
            self.bytes(step)
            count -= step

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form)))[0]

    def count(self, what: str, most: int) -> int:
        number: int = self.number("Q")
        if number > most:
            raise ValueError(f"{number} {what}; at most {most} are read")
        return number

    def text(self, what: str, most: int) -> str:
        return self.bytes(self.count(f"bytes of {what}", most)).decode("utf-8", "replace")


def _header(reader: _Reader) -> tuple[dict[str, object], list[Tensor]]:
    magic = reader.bytes(4)
    if magic != b"GGUF":
        raise ValueError(f"it begins with {shown(magic)}")
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; accepted: 2 and 3, little-endian")
    tensors = reader.count("tensors", _MOST_TENSORS)
    entries = reader.count("entries", _MOST_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = reader.text("a name", _LONGEST_NAME)
        value = _value(reader, name)
        if value is not None:
            metadata[name] = value
    return metadata, [_tensor(reader) for _ in range(tensors)]


def _value(reader: _Reader, name: str) -> object:
    """A value; None for one that is passed over."""
    kind = reader.number("I")
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind])
    if kind == _TEXT:
        text = reader.text("a text", _LONGEST_TEXT)
        return text if len(text) <= _KEPT_TEXT else None
    if kind != _ARRAY:
        raise ValueError(f"{shown(name)} is of type {kind}")
    inner = reader.number("I")
    count = reader.count(f"elements of {shown(name)}", _MOST_ELEMENTS)
    if inner == _TEXT:
        for _ in range(count):
            reader.skip(reader.count("bytes of a text", _LONGEST_TEXT))
        return None
    if inner not in _SCALARS:
        raise ValueError(f"{shown(name)} holds elements of type {inner}")
    size = struct.calcsize("<" + _SCALARS[inner])
    if count > _MOST_KEPT:
        reader.skip(count * size)
        return None
    return list(struct.unpack(f"<{count}{_SCALARS[inner]}", reader.bytes(count * size)))


def _tensor(reader: _Reader) -> Tensor:
    name = reader.text("a name", _LONGEST_NAME)
    dimensions = reader.number("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {shown(name)} has {dimensions} dimensions; accepted: 1 to 4")
    shape = tuple(reader.count(f"elements of {shown(name)}", _MOST_SIZE) for _ in range(dimensions))
    number = reader.number("I")
    reader.number("Q")  # where its data begin
    if number not in TYPES:
        raise ValueError(f"tensor {shown(name)} is of type {number}")
    kind, elements, size = TYPES[number]
    if shape[0] % elements or math.prod(shape) > _MOST_SIZE:
        raise ValueError(f"tensor {shown(name)} of {kind} has the sizes {list(shape)}")
    return Tensor(name, shape, kind, math.prod(shape) // elements * size)
