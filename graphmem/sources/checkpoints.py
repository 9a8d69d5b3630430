"""What a checkpoint beside a configuration says in its headers: names, types and shapes of tensors, never their data.

Of ``.safetensors`` files only the header is read: eight bytes of its length and so much JSON
(https://github.com/huggingface/safetensors, format). Of ``.gguf`` files nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmem.documents import parse_json, shown
from graphmem.errors import SourceError

#: The longest header that safetensors itself accepts.
_LONGEST_HEADER = 100_000_000
#: Bits of an element by its type's name in headers.
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of every tensor by its name."""

    tensors: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(self.tensors.values())

    @property
    def has_head(self) -> bool:
        """Whether the output's projection is a tensor of its own."""
        return any(name.split(".")[0] in ("lm_head", "output") for name in self.tensors)


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """The headers of all ``.safetensors`` files of a folder, None where it has none. Raises :class:`SourceError`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    tensors: dict[str, int] = {}
    for file in files:
        tensors |= _header(file)
    return Checkpoint(tensors)


def _header(file: Path) -> dict[str, int]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, max(0, file.stat().st_size - 8)):
                raise SourceError(f"{file} is no safetensors file: its header has {length} bytes")
            document = parse_json(opened.read(length))
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SourceError(f"{file} is no safetensors file: {error}") from None
    if not isinstance(document, dict):
        raise SourceError(f"{file} is no safetensors file: its header is {shown(document)}")
    return {name: _bytes(file, name, entry) for name, entry in document.items() if name != "__metadata__"}


def _bytes(file: Path, name: str, entry: Any) -> int:
    kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if kind not in _BITS or not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise SourceError(f"{file}: tensor {shown(name)} is {shown(entry)}")
    return math.prod(shape) * _BITS[kind] // 8
