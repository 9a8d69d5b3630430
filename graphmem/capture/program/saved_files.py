"""Files of tensors that a program writes and reads again: they are kept in memory, as shapes, and never written.

``torch.save`` pickles the rest of an object for real, so that what cannot be pickled is the error that it is on a card,
and what is loaded is a copy. Of every storage it notes bytes and device; ``torch.load`` takes them anew, one after the
other, on the device that ``map_location`` names (``persistent_load`` and ``restore_location``, torch/serialization.py:
a storage is read to the host and copied whole). Files of safetensors are kept likewise. To the program such a file
exists, can be renamed, copied and removed; listing a folder shows it. What was on the disk before is read from there.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.capture.patches import Patches
from graphmem.capture.values.callers import called_to_tell_storages_apart
from graphmem.errors import CaptureError

_TOKEN = b"graphmem saved object "
_TOKEN_BYTES = len(_TOKEN) + 32


@dataclass(frozen=True)
class _Tensor:
    """A tensor as it was saved; ``data`` holds those of real host tensors."""

    storage: int
    device: str
    storage_elements: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_parameter: bool
    data: torch.Tensor | None


@dataclass
class _Saved:
    """What one call has saved: the pickled rest, and the tensors in it."""

    pickled: bytes = b""
    tensors: list[_Tensor | str] = field(default_factory=list)  # of those that cannot be loaded, the type's name

    @classmethod
    def of(cls, obj: Any) -> _Saved:
        """Pickle ``obj``. Raises what pickling it raises."""
        saved, file = cls(), io.BytesIO()
        _Pickler(file, saved).dump(obj)
        saved.pickled = file.getvalue()
        return saved

    @property
    def bytes(self) -> int:
        """About the size of the file."""
        plain = [tensor for tensor in self.tensors if isinstance(tensor, _Tensor)]
        storages = {tensor.storage: tensor.storage_elements * tensor.dtype.itemsize for tensor in plain}
        size: int = len(self.pickled) + sum(storages.values())
        return size


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, saved: _Saved) -> None:
        super().__init__(file, protocol=2)
        self._saved = saved
        self._kept: list[Any] = []  # storages live until the end, so that their addresses tell them apart

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        is_plain = obj.layout is torch.strided and type(obj) in (FakeTensor, torch.Tensor, torch.nn.Parameter)
        self._saved.tensors.append(self._noted(obj) if is_plain else type(obj).__name__)
        return len(self._saved.tensors) - 1

    def _noted(self, tensor: torch.Tensor) -> _Tensor:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        data = None
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                data = tensor.detach().clone()
        return _Tensor(
            storage._cdata,
            tensor.device.type,
            storage.nbytes() // tensor.element_size(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
            data,
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, saved: _Saved, place: Callable[[str], str]) -> None:
        super().__init__(io.BytesIO(saved.pickled))
        self._saved, self._place = saved, place
        self._storages: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return _loaded(self._saved.tensors[pid], self._place, self._storages)


def _loaded(saved: _Tensor | str, place: Callable[[str], str], storages: dict[int, torch.Tensor]) -> torch.Tensor:
    if isinstance(saved, str):
        raise CaptureError(f"a {saved} was saved, and loading one is not followed; leave it out of the checkpoint")
    device = place(saved.device)
    with torch.no_grad():
        if saved.data is not None:
            tensor = saved.data.clone().to(device)
        else:
            whole = storages.get(saved.storage)
            if whole is None:
                whole = torch.empty(saved.storage_elements, dtype=saved.dtype, device=device)
                storages[saved.storage] = whole
            if whole.dtype is not saved.dtype:
                whole = whole.view(saved.dtype)
            tensor = whole.as_strided(saved.shape, saved.stride, saved.offset).detach()
    if saved.is_parameter:
        return torch.nn.Parameter(tensor, saved.requires_grad)
    return tensor.requires_grad_(saved.requires_grad)


class _Probe:
    """A storage that a ``map_location`` function is asked about."""

    def __init__(self, device: str) -> None:
        self.device = device

    def cuda(self, *_: Any, **__: Any) -> _Probe:
        return _Probe("cuda")

    def cpu(self) -> _Probe:
        return _Probe("cpu")


def _placing(map_location: Any) -> Callable[[str], str]:
    """Where a storage that was on a device goes (``_get_restore_location``)."""
    if map_location is None:
        return lambda device: device
    if isinstance(map_location, dict):
        named = {torch.device(key).type: torch.device(value).type for key, value in map_location.items()}
        return lambda device: named.get(device, device)
    if isinstance(map_location, (str, torch.device)):
        return lambda _: torch.device(map_location).type

    def asked(device: str) -> str:
        location = "cuda:0" if device == "cuda" else device
        answer = map_location(_Probe("cpu"), location)
        return device if answer is None else str(answer.device)

    return asked


class SavedFiles:
    """What was saved, by absolute path, and in open files by a token that stands in them."""

    def __init__(self, on_stage: Callable[[str], Any]) -> None:
        self._stage = on_stage
        self.files: dict[str, _Saved] = {}
        self._in_streams: dict[bytes, _Saved] = {}

    # --- torch --------------------------------------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        """``torch.save``."""
        with self._stage("save"):
            saved = _Saved.of(obj)
            if _is_path(f):
                self._put(f, saved)
            else:
                token = _TOKEN + uuid.UUID(int=len(self._in_streams)).hex.encode()
                self._in_streams[token] = saved
                f.write(token)

    def loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.load``, for what was saved; ``original`` for other files."""

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            saved = self.files.get(_key(f)) if _is_path(f) else self._in_stream(f)
            if saved is None:
                return original(f, map_location, *args, **kwargs)
            with self._stage("load"):
                return _Unpickler(saved, _placing(map_location)).load()

        return load

    def _in_stream(self, stream: Any) -> _Saved | None:
        name = getattr(stream, "name", None)  # open(path, "rb")
        if isinstance(name, str) and _key(name) in self.files:
            return self.files[_key(name)]
        if not hasattr(stream, "read") or not hasattr(stream, "seek"):
            return None
        start = stream.tell()
        saved = self._in_streams.get(stream.read(_TOKEN_BYTES))
        if saved is None:
            stream.seek(start)
        return saved

    def _put(self, path: Any, saved: _Saved) -> None:
        key = _key(path)
        folder = os.path.dirname(key)
        if not os.path.isdir(folder):
            # PyTorch's words
            raise RuntimeError(f"Parent directory {os.path.dirname(os.fspath(path))} does not exist.")
        self.files[key] = saved

    # --- safetensors --------------------------------------------------------------------------------------------------

    def serialize_file(self, tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        """``safetensors.serialize_file``, of tensors in place of their bytes."""
        with self._stage("save"):
            self._put(filename, _Saved.of(({name: t.detach() for name, t in tensors.items()}, metadata)))

    def opening(self, original: Any) -> Callable[..., Any]:
        """``safetensors.safe_open``, for what was saved; ``original`` for other files."""

        def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
            saved = self.files.get(_key(filename))
            if saved is None:
                return original(filename, framework, device=device, **options)
            return _SafeFile(saved, device)

        return safe_open

    # --- the file system ----------------------------------------------------------------------------------------------

    def patch_files(self, patches: Patches) -> None:
        """Let the program's questions about files know those that were saved."""
        files = self.files

        def about(original: Any, answer: Callable[[str], Any]) -> Any:
            def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
                known = files and _is_path(path) and _key(path) in files
                return answer(_key(path)) if known else original(path, *args, **kwargs)

            return asked

        def moving(original: Any, keeps: bool) -> Any:
            def moved(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
                if not (files and _is_path(source) and _key(source) in files):
                    return original(source, target, *args, **kwargs)
                if os.path.isdir(target):
                    target = os.path.join(target, os.path.basename(source))
                files[_key(target)] = files[_key(source)] if keeps else files.pop(_key(source))
                return target

            return moved

        def listing(original: Any) -> Any:
            def listed(path: Any = ".") -> Any:
                names = original(path)
                folder = _key(path) if _is_path(path) else None
                return [*names, *(os.path.basename(key) for key in files if os.path.dirname(key) == folder)]

            return listed

        patches.set(os, "stat", about(os.stat, lambda key: _status(files[key])))
        for name in ("remove", "unlink"):
            patches.set(os, name, about(getattr(os, name), lambda key: files.pop(key) and None))
        for name in ("rename", "replace"):
            patches.set(os, name, moving(getattr(os, name), keeps=False))
        patches.set(shutil, "move", moving(shutil.move, keeps=False))
        for name in ("copy", "copy2", "copyfile"):
            patches.set(shutil, name, moving(getattr(shutil, name), keeps=True))
        patches.set(os, "listdir", listing(os.listdir))


class _SafeFile:
    """An open file of safetensors."""

    def __init__(self, saved: _Saved, device: Any) -> None:
        self._place = _placing("cuda" if isinstance(device, int) else device)
        self._numbers, self._metadata = _Names(saved).load()
        self._tensors = saved.tensors

    def __enter__(self) -> _SafeFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        return list(self._numbers)

    offset_keys = keys

    def metadata(self) -> Any:
        return self._metadata

    def saved(self, name: str) -> _Tensor:
        """What is noted of a tensor."""
        saved = self._tensors[self._numbers[name]]
        assert isinstance(saved, _Tensor)
        return saved

    def get_tensor(self, name: str) -> torch.Tensor:
        return _loaded(self._tensors[self._numbers[name]], self._place, {})

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._numbers}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name)


class _Names(pickle.Unpickler):
    """Reads the names of tensors with their numbers."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__(io.BytesIO(saved.pickled))

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Slice:
    """A tensor of a file that is read when it is subscripted."""

    def __init__(self, file: _SafeFile, name: str) -> None:
        self._file, self._name, self._saved = file, name, file.saved(name)

    def get_shape(self) -> list[int]:
        return list(self._saved.shape)

    def get_dtype(self) -> str:
        return _SAFE_NAMES.get(self._saved.dtype, "U8")

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]


#: Of the format's header (https://huggingface.co/docs/safetensors).
_SAFE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def _is_path(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike))


def _key(path: Any) -> str:
    return str(os.path.abspath(os.fspath(path)))


def _status(saved: _Saved) -> os.stat_result:
    now = int(time.time())
    return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, saved.bytes, now, now, now))


def patch_saved_files(patches: Patches, on_stage: Callable[[str], Any], *, whole_program: bool) -> None:
    """Keep what the step saves. Only a whole program asks the file system about it."""
    saved = SavedFiles(on_stage)
    patches.set(torch, "save", saved.save)
    patches.set(torch, "load", saved.loading(torch.load))
    if not whole_program:
        return
    saved.patch_files(patches)
    patches.set(torch.UntypedStorage, "data_ptr", _data_ptr(torch.UntypedStorage.data_ptr))
    if find_spec("safetensors") is not None:
        module = import_module("safetensors.torch")
        patches.set(module, "serialize_file", saved.serialize_file)
        for name in ("_flatten", "_flatten_as_ptr"):  # the newer name keeps no bytes
            if hasattr(module, name):
                patches.set(module, name, lambda tensors, *_: tensors)
        patches.set(module, "_filter_shared_not_shared", lambda tensors, _: tensors)  # it compares addresses
        original = import_module("safetensors").safe_open
        opening = saved.opening(original)
        for owner in _that_know("safe_open", original):
            patches.set(owner, "safe_open", opening)


def _data_ptr(original: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(self: torch.UntypedStorage) -> int:
        return int(self._cdata) if called_to_tell_storages_apart() else original(self)

    return data_ptr


def _that_know(name: str, value: Any) -> Iterator[Any]:
    """The modules that have imported something by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is value:
            yield module
