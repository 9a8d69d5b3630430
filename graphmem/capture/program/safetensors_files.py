"""Files of safetensors: of true size with holes when a program saves them, and their header when it loads them.

The format: eight bytes that say how long the header is, the header in JSON, the tensors one after the other
(https://huggingface.co/docs/safetensors). Names of types, their order and the metadata are written by the library
itself, of empty tensors. A tensor without values is told from one of zeros by the order of its three fields, which
readers of JSON leave alone: the file is as long as the library's own. Small tensors that are no weights, such as the
state of a quantised one, are read with their data; of all others there are shapes.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, BinaryIO

import torch

from graphmem.base.documents import parse_json
from graphmem.capture.patches import Patches
from graphmem.capture.program.file_storages import SMALL
from graphmem.capture.program.torch_archives import IN_FULL, write_zeros
from graphmem.capture.torch_internals import FakeTensor, disable_current_modes, unset_fake_temporarily
from graphmem.capture.values.known_values import KnownValues

#: Names of types in the header.
_TYPES = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
        "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, dtype)
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Described:
    """A tensor of a file; ``data``: its bytes, where they were read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes | None = None

    def tensor(self, device: torch.device | str | int | None) -> torch.Tensor:
        if self.data is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        with disable_current_modes(), unset_fake_temporarily():
            real = torch.empty(self.shape, dtype=self.dtype, device="cpu")
            real.view(-1).view(torch.uint8).numpy()[:] = list(self.data)
        return real.to(device)


# --- writing ----------------------------------------------------------------------------------------------------------


class _Tensor:
    """Stands for the array of a tensor's bytes in ``safetensors.torch``, and is its own address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()
        self.ctypes = types.SimpleNamespace(data=self)

    def content(self, values: KnownValues) -> bytes | None:
        tensor = self.tensor.detach()
        if isinstance(tensor, FakeTensor):
            known = None if values.drawn((tensor,)) else values.of(tensor)
        else:
            known = None if values.is_stale(tensor.untyped_storage()) else tensor
        if known is None:
            return None
        with disable_current_modes(), unset_fake_temporarily():
            return bytes(known.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class _Spec:
    """``safetensors.TensorSpec`` of such a tensor."""

    dtype: str
    shape: Any
    data_ptr: _Tensor
    data_len: int


def _laid_out(
    module: ModuleType, specs: dict[str, Any], metadata: object, values: KnownValues
) -> tuple[bytes, list[Any]]:
    """The header, and of every tensor its bytes, or how many zeros stand for them."""
    plain = {name: _spec(spec) for name, spec in specs.items()}
    if hasattr(module, "TensorSpec"):
        empty = {n: module.TensorSpec(dtype=s.dtype, shape=[0], data_ptr=0, data_len=0) for n, s in plain.items()}
    else:
        empty = {name: {"dtype": spec.dtype, "shape": [0], "data": b""} for name, spec in plain.items()}
    header = _header(io.BytesIO(module.serialize(empty, metadata=metadata)))[0]
    pieces: list[Any] = []
    end = 0
    for name in header:
        if name == _METADATA:
            continue
        spec, start = plain[name], end
        end += spec.data_ptr.nbytes
        shape = list(spec.shape)
        if header[name]["dtype"] == "F4" and shape:
            shape[-1] *= 2  # two of them in a byte
        fields = {"dtype": header[name]["dtype"], "shape": shape, "data_offsets": [start, end]}
        content = spec.data_ptr.content(values)
        pieces.append(spec.data_ptr.nbytes if content is None else content)
        header[name] = fields if content is not None else _marked(fields)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, pieces


def _spec(spec: Any) -> _Spec:
    """Of older versions' dictionaries, a record."""
    if isinstance(spec, dict):
        return _Spec(spec["dtype"], spec["shape"], spec["data"], spec["data"].nbytes)
    found: _Spec = spec
    return found


def _marked(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields in the order that says: no values."""
    return {name: fields[name] for name in ("shape", "dtype", "data_offsets")}


def _is_marked(fields: dict[str, Any]) -> bool:
    return next(iter(fields)) == "shape"


def _write(file: BinaryIO, header: bytes, pieces: list[Any]) -> None:
    file.write(header)
    for piece in pieces:
        if isinstance(piece, int):
            write_zeros(file, piece)
        else:
            file.write(piece)


# --- reading ----------------------------------------------------------------------------------------------------------


def saved_on_disk(file: BinaryIO) -> tuple[dict[str, Described], Any] | None:
    """The tensors and the metadata of an open file; None for what is not understood, which safetensors may explain."""
    try:
        header, begin = _header(file)
        metadata = header.pop(_METADATA, None)
        return {name: _described(entry, file, begin) for name, entry in header.items()}, metadata
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StopIteration, struct.error):
        return None


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LARGEST_HEADER:
        raise ValueError
    return parse_json(file.read(length)), 8 + length


def _described(entry: dict[str, Any], file: BinaryIO, begin: int) -> Described:
    """A tensor of the header. Raises for what is no description."""
    dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    size = math.prod(shape) * dtype.itemsize
    if any(type(length) is not int or length < 0 for length in shape) or end - start != size:
        raise ValueError
    if dtype.is_floating_point or dtype.is_complex or size > SMALL or _is_marked(entry):
        return Described(dtype, shape)
    file.seek(begin + start)
    data = file.read(size)
    if len(data) != size:
        raise ValueError
    return Described(dtype, shape, data)


class SafeFile:
    """An open file of safetensors. ``forget`` is told of tensors whose values are unknown."""

    def __init__(
        self,
        tensors: dict[str, Described],
        metadata: object = None,
        device: torch.device | str | int | None = "cpu",
        forget: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        self._tensors, self._metadata, self._forget = tensors, metadata, forget
        self.device = "cuda" if isinstance(device, int) else torch.device(device).type

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        return list(self._tensors)

    offset_keys = keys

    def metadata(self) -> object:
        return self._metadata

    def described(self, name: str) -> Described:
        return self._tensors[name]

    def get_tensor(self, name: str, device: torch.device | str | int | None = None) -> torch.Tensor:
        described = self._tensors[name]
        with torch.no_grad():
            tensor = described.tensor(device or self.device)
        if described.data is None:
            self._forget(tensor)
        return tensor

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._tensors}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name)


class _Slice:
    """A tensor of a file, of which a part is read when it is subscripted: taken on the host, then moved."""

    def __init__(self, file: SafeFile, name: str) -> None:
        self._file, self._name, self._described = file, name, file.described(name)

    def get_shape(self) -> list[int]:
        return list(self._described.shape)

    def get_dtype(self) -> str:
        return _NAMES[self._described.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name, "cpu")[index].to(self._file.device)


# --- the library's names ----------------------------------------------------------------------------------------------


def patch_safetensors(
    patches: Patches,
    stage: Callable[[str], AbstractContextManager[object]],
    place: Callable[[object, str], Any],
    values: KnownValues,
    missing: dict[str, dict[str, Described]],
) -> None:
    """Let safetensors write holes and read headers. ``place`` gives the path to open; ``missing`` are tensors of files
    that are not there, by path."""
    library, module = import_module("safetensors"), import_module("safetensors.torch")
    _patch_writing(patches, library, module, stage, place, values)
    safe_open = library.safe_open

    def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **options: object) -> object:
        found = missing.get(os.path.abspath(filename))
        if found is not None:
            return SafeFile(found, None, device)
        filename, saved = place(filename, "rb"), None
        if framework in ("pt", "torch", "pytorch"):
            with suppress(OSError), open(filename, "rb") as file:
                saved = saved_on_disk(file)
        if saved is not None:
            return SafeFile(*saved, device, values.forget)
        return safe_open(filename, framework, device=device, **options)

    for owner in _that_know("safe_open", safe_open):
        patches.set(owner, "safe_open", opened)
    deserialize, as_tensors = module.deserialize, module._view2torch

    def deserialized(data: bytes) -> object:
        saved = saved_on_disk(io.BytesIO(data))
        return deserialize(data) if saved is None else SafeFile(*saved, "cpu", values.forget).get_tensors()

    patches.set(module, "deserialize", deserialized)
    patches.set(module, "_view2torch", lambda flat: flat if isinstance(flat, dict) else as_tensors(flat))


def _patch_writing(
    patches: Patches,
    library: ModuleType,
    module: ModuleType,
    stage: Callable[[str], AbstractContextManager[object]],
    place: Callable[[object, str], Any],
    values: KnownValues,
) -> None:
    def serialize_file(specs: dict[str, Any], filename: str, metadata: object = None) -> None:
        with stage("save"):
            header, pieces = _laid_out(library, specs, metadata, values)
            try:
                with open(place(filename, "wb"), "wb") as file:
                    _write(file, header, pieces)
            except OSError as error:
                raise library.SafetensorError(f"Error while serializing: I/O error: {error}") from None

    def serialize(specs: dict[str, Any], metadata: object = None) -> bytes:
        """The bytes of the file; its header alone where the tensors have more than ``IN_FULL`` bytes."""
        with stage("save"):
            header, pieces = _laid_out(library, specs, metadata, values)
            size = sum(piece if isinstance(piece, int) else len(piece) for piece in pieces)
            return header if size > IN_FULL else b"".join([header, *(bytes(piece) for piece in pieces)])

    patches.set(module, "serialize_file", serialize_file)
    patches.set(module, "serialize", serialize)
    if hasattr(module, "TensorSpec"):
        patches.set(module, "TensorSpec", _Spec)
    if hasattr(module, "_to_ndarray"):  # the newer gives the tensor too
        patches.set(module, "_to_ndarray", lambda tensor, *_: (_Tensor(tensor), tensor))
    if hasattr(module, "_tobytes"):
        patches.set(module, "_tobytes", lambda tensor, *_: _Tensor(tensor))


def _that_know(name: str, value: Any) -> Iterator[Any]:
    """The modules that have imported something by its name, or what stood in its place in an earlier capture."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) == value:
            yield module
