"""The headers of a checkpoint beside a configuration: names, types and shapes of tensors, never their data.

Of ``.safetensors`` files only the header is read: eight bytes of its length and so much JSON
(https://github.com/huggingface/safetensors, format). Of a folder's files that is ``model.safetensors``, else those
that ``model.safetensors.index.json`` names, as transformers' ``from_pretrained`` has it; else all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphmem.base.documents import LARGEST_NUMBER, open_file, parse_json, shown
from graphmem.errors import SourceError, first_line
from graphmem.sources.configurations import read

#: The longest header that safetensors itself accepts.
_LONGEST_HEADER = 100_000_000
#: Files that an index may name.
_MOST_SHARDS = 1 << 12
#: Bits of an element by its type's name in headers (``safetensors/src/tensor.rs``, 0.6).
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8,
    "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: How the file begins that stands for one which git keeps elsewhere.
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of every tensor by its name; of a folder with nothing but an index, ``declared_bytes`` of all together.
    ``types``: bytes by type."""

    tensors: Mapping[str, int]
    declared_bytes: int | None = None
    types: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(self.tensors.values()) if self.declared_bytes is None else self.declared_bytes

    @property
    def has_head(self) -> bool:
        """Whether the output's projection is a tensor of its own."""
        return any(name.split(".")[0] in ("lm_head", "output") for name in self.tensors)

    def describe(self) -> str:
        """The types of its tensors: ``U8 10.04 GB, BF16 3.58 GB`` with the largest first."""
        largest = sorted(self.types.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / 1e9:,.2f} GB" for name, size in largest)


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """The headers of a folder's ``.safetensors`` files, None where it has none. Raises :class:`SourceError`."""
    index = folder / _INDEX
    if (folder / _FILE).exists():
        return _of_files([folder / _FILE])
    if index.exists():
        return _of_index(index)
    files = sorted(folder.glob("*.safetensors"))
    return _of_files(files) if files else None


def _of_files(files: list[Path]) -> Checkpoint:
    tensors: dict[str, int] = {}
    types: dict[str, int] = {}
    for file in files:
        for name, (kind, size) in _header(file).items():
            if name in tensors:
                raise SourceError(f"{file}: tensor {shown(name)} is in another file too")
            tensors[name] = size
            types[kind] = types.get(kind, 0) + size
    return Checkpoint(tensors, types=types)


def _of_index(index: Path) -> Checkpoint:
    """The files that the index names; where none of them is there, its total."""
    document = read(index, "an index of safetensors files")
    table = document if isinstance(document, dict) else {}
    where = table.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise SourceError(f"{index} is no index of safetensors files: it has no weight_map of names")
    names = sorted(set(where.values()))
    if len(names) > _MOST_SHARDS:
        raise SourceError(f"{index} names {len(names):,} files; at most {_MOST_SHARDS:,} are read")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise SourceError(f"{index} names {shown(name)}, which is no safetensors file beside it")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing and len(missing) < len(names):
        raise SourceError(
            f"{index} names {shown(missing[0])}, which is not there ({len(missing)} of {len(names)} files)"
        )
    if missing:
        metadata = table.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, float) and total.is_integer():
            total = int(total)
        if type(total) is not int or not 0 < total <= LARGEST_NUMBER:
            raise SourceError(f"{index}: total_size is {shown(total)}, and none of its files is there")
        return Checkpoint(dict.fromkeys(where, 0), total)
    return _of_files([index.parent / name for name in names])


def _header(file: Path) -> dict[str, tuple[str, int]]:
    """Type and bytes of each tensor. Raises :class:`SourceError`."""
    try:
        with open_file(file, pipes=False) as opened:
            begin = opened.read(8)
            length, most = int.from_bytes(begin, "little"), file.stat().st_size - 8
            if not 2 <= length <= min(_LONGEST_HEADER, max(0, most)):
                if (begin + opened.read(16)).startswith(_POINTER):
                    raise SourceError(f"{file} is git's pointer to the file, not the file; fetch it with git lfs pull")
                raise SourceError(f"{file} is no safetensors file: its header has {length} bytes")
            document = parse_json(opened.read(length))
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SourceError(f"{file} is no safetensors file: {first_line(error)}") from None
    if not isinstance(document, dict):
        raise SourceError(f"{file} is no safetensors file: its header is {shown(document)}")
    return {name: _tensor(file, name, entry) for name, entry in document.items() if name != "__metadata__"}


def _tensor(file: Path, name: str, entry: object) -> tuple[str, int]:
    """(type, bytes). Offsets of its data in the header must span as many bytes."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape = fields.get("dtype"), fields.get("shape")
    if (
        not isinstance(kind, str) or kind not in _BITS or not isinstance(shape, list)
        or not all(type(size) is int and 0 <= size <= LARGEST_NUMBER for size in shape)
    ):  # fmt: skip
        wrong = fields.get("dtype") if isinstance(shape, list) else entry
        raise SourceError(f"{file}: tensor {shown(name)} is of {shown(wrong)}, which is no type and shape")
    values = math.prod(shape) if len(shape) <= 64 else LARGEST_NUMBER
    size = -(-values * _BITS[kind] // 8)
    if size > LARGEST_NUMBER:
        raise SourceError(f"{file}: tensor {shown(name)} has more than 64 bits of bytes")
    offsets = fields.get("data_offsets")
    if offsets is not None and not (
        isinstance(offsets, list) and len(offsets) == 2 and all(type(one) is int for one in offsets)
        and offsets[0] >= 0 and offsets[1] - offsets[0] == size
    ):  # fmt: skip
        raise SourceError(f"{file}: tensor {shown(name)} of {size:,} bytes is said to lie at {str(offsets)[:60]}")
    return kind, size
