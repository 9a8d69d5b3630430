"""Files of safetensors: those that a program saved, and those on the disk, of which the header is read.

The format: eight bytes that say how long the header is, the header in JSON, the tensors one after the other
(https://huggingface.co/docs/safetensors). Small tensors that are no weights, such as the state of a quantised one,
are read with their data; of all others there are shapes.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from graphmem.capture.program.saved_tensors import Saved, SavedTensor, loaded, placing
from graphmem.documents import parse_json

#: Names of types in the header.
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
#: Tensors of integers up to so many bytes are read.
_SMALL = 1 << 16


def saved_on_disk(path: Path) -> Saved | None:
    """What a file of the disk holds; None for one that is not understood, which safetensors itself may explain."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                return None
            header = parse_json(file.read(length))
            metadata = header.pop("__metadata__", None)
            tensors = {name: _described(entry) for name, entry in header.items()}
            for tensor, start in tensors.values():
                if tensor.data is not None:
                    file.seek(8 + length + start)
                    tensor.data.view(-1).view(torch.uint8).numpy()[:] = list(file.read(tensor.data.nbytes))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return None
    saved = Saved(tensors=[tensor for tensor, _ in tensors.values()])
    saved.pickled = pickle.dumps(({name: number for number, name in enumerate(tensors)}, metadata), protocol=2)
    return saved


def _described(entry: dict[str, Any]) -> tuple[SavedTensor, int]:
    """A tensor of the header, and where its data begin. Raises for what is no description."""
    dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    elements = math.prod(shape)
    if any(type(size) is not int or size < 0 for size in shape) or end - start != elements * dtype.itemsize:
        raise ValueError
    with unset_fake_temporarily():
        is_read = not dtype.is_floating_point and end - start <= _SMALL
        data = torch.empty(shape, dtype=dtype, device="cpu") if is_read else None
        stride = torch.empty(shape, device="meta").stride()
    return SavedTensor(start, "cpu", elements, dtype, shape, stride, 0, False, False, data), start


class SafeFile:
    """An open file of safetensors."""

    def __init__(self, saved: Saved, device: Any) -> None:
        self._place = placing("cuda" if isinstance(device, int) else device)
        self._numbers, self._metadata = Names(saved).load()
        self._tensors = saved.tensors

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        return list(self._numbers)

    offset_keys = keys

    def metadata(self) -> Any:
        return self._metadata

    def saved(self, name: str) -> SavedTensor:
        """What is noted of a tensor."""
        saved = self._tensors[self._numbers[name]]
        assert isinstance(saved, SavedTensor)
        return saved

    def get_tensor(self, name: str) -> torch.Tensor:
        return loaded(self._tensors[self._numbers[name]], self._place, {})

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._numbers}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name)


class Names(pickle.Unpickler):
    """Reads the names of tensors with their numbers."""

    def __init__(self, saved: Saved) -> None:
        super().__init__(io.BytesIO(saved.pickled))

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Slice:
    """A tensor of a file that is read when it is subscripted."""

    def __init__(self, file: SafeFile, name: str) -> None:
        self._file, self._name, self._saved = file, name, file.saved(name)

    def get_shape(self) -> list[int]:
        return list(self._saved.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self._saved.dtype, "U8")

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]
