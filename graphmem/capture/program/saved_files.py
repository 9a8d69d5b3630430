"""``torch.save`` and ``torch.load``: real files of true size, hollow where values are unknown.

PyTorch's own functions run, with its pickler, its ``weights_only`` unpickler and its errors. Beneath them a writer of
archives stands that leaves holes (:mod:`torch_archives`), and a reader that reads no weights; what is pickled of a fake
tensor, and made of a storage in a file, is :mod:`file_storages`. So a program finds, lists, copies and hashes what it
saved as any file, and a checkpoint that was on the disk before is loaded the same way.

A program that is run whole writes where it says, by ordinary calls. A single step has its files to itself: they lie in
a temporary folder until the capture ends, and are loaded from there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, BinaryIO

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.program.file_storages import HOLLOW_KEY, Books, FileStorage, bytes_of, patch_pickling
from graphmem.capture.program.hub_names import hub_names
from graphmem.capture.program.missing_weights import missing_weights
from graphmem.capture.program.safetensors_files import Described, patch_safetensors
from graphmem.capture.program.torch_archives import HOLLOW, ArchiveWriter, keeping_holes
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.values.known_values import KnownValues
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private
from graphmem.units import format_bytes

_LOST = "files of tensors cannot be followed"

_Stage = Callable[[str], contextlib.AbstractContextManager[Any]]


class Folder:
    """Where files lie that a step saves: the program's own place, or a temporary folder for each of its paths."""

    def __init__(self, is_own: bool) -> None:
        self._temporary = None if is_own else tempfile.TemporaryDirectory(prefix="graphmem-")
        self._names: dict[str, str] = {}

    def place(self, path: Any, mode: str) -> Any:
        """Where a path is opened. Raises :class:`OSError` for one that could not be written."""
        if self._temporary is None or not isinstance(path, (str, os.PathLike)):
            return path
        key = os.path.abspath(os.fspath(path))
        if "w" in mode and key not in self._names:
            if not os.path.isdir(os.path.dirname(key)):
                raise FileNotFoundError(2, os.strerror(2), path)
            self._names[key] = os.path.join(self._temporary.name, str(len(self._names)))
        return self._names.get(key, path)

    def remove(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


@contextlib.contextmanager
def files_of_tensors(recorder: Recorder, remark: Callable[[Diagnostic], None], whole_program: bool) -> Iterator[None]:
    """Until the end what is saved is hollow, and what is loaded has shapes."""
    stage, values = recorder.phases.stage_of, recorder.values
    patches, folder, books = Patches(), Folder(whole_program), Books(values)
    missing: dict[str, dict[str, Described]] = {}
    try:
        patch_pickling(patches, books)
        _patch_saving(patches, stage, folder, values)
        _patch_loading(patches, stage, folder, books)
        if find_spec("safetensors") is not None:
            patch_safetensors(patches, stage, folder.place, values, missing)
        if hasattr(shutil, "_fastcopy_sendfile") and hasattr(os, "SEEK_DATA"):
            patches.set(shutil, "_fastcopy_sendfile", keeping_holes(shutil._fastcopy_sendfile))
        with (
            hub_names(remark) as folders,
            missing_weights(lambda path: missing.update({os.path.abspath(path): {}}), remark, folders),
        ):
            yield
        if books.omitted:
            remark(Code.WEIGHTS_OMITTED.about(size=format_bytes(books.omitted)))
    finally:
        patches.undo()
        folder.remove()


# --- saving -----------------------------------------------------------------------------------------------------------


def _patch_saving(patches: Patches, stage: _Stage, folder: Folder, values: KnownValues) -> None:
    serialization = torch.serialization

    def staged(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: object, **kwargs: object) -> object:
            with stage("save"):
                return original(*args, **kwargs)

        return save

    for name in ("_save", "_legacy_save"):
        patches.set(serialization, name, staged(getattr(serialization, name)))

    def writer(file: BinaryIO, compute_crc32: bool = True, storage_alignment: int = 64) -> _Writer:
        if not isinstance(file, str):
            return _Writer(values, file, alignment=storage_alignment)
        return _Writer(values, _opened_for_archive(file, folder), file, storage_alignment)

    patches.replace("torch._C.PyTorchFileWriter", _LOST, writer)


def _opened_for_archive(name: str, folder: Folder) -> object:
    """Raises the errors of ``PyTorchStreamWriter`` (caffe2/serialize/inline_container.cc, 2.13)."""
    if not os.path.basename(name).rpartition(".")[0] and "." in os.path.basename(name):
        raise RuntimeError(f"invalid file name: {name}")
    try:
        return open(folder.place(name, "wb"), "wb")
    except OSError as error:
        parent = os.path.dirname(name)
        if parent and not os.path.isdir(parent):
            raise RuntimeError(f"Parent directory {parent} does not exist.") from None
        raise RuntimeError(f"open file failed with strerror: {error.strerror}") from None


class _Writer(ArchiveWriter):
    """Writes storages too: those with values, and holes for the others."""

    def __init__(self, values: KnownValues, stream: BinaryIO, name: str | None = None, alignment: int = 64) -> None:
        super().__init__(stream, name, alignment)
        self._values = values

    def write_record(self, name: str, data: object, size: int) -> None:
        if isinstance(data, FileStorage):
            data = None if data.read is None else data.read()
        elif isinstance(data, torch.UntypedStorage):
            is_known = data.device.type == "cpu" and not self._values.is_stale(data)
            data = bytes_of(data) if is_known else None
        super().write_record(name, data, size)


# --- loading ----------------------------------------------------------------------------------------------------------


def _patch_loading(patches: Patches, stage: _Stage, folder: Folder, books: Books) -> None:
    serialization, guards = torch.serialization, private("torch._guards", _LOST)
    reading = threading.local()  # ``depth``: within it no fake mode is seen; ``older``: the file of the older format

    def unseen(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if getattr(reading, "depth", 0) else original(*args)

    for name in ("detect_fake_mode", "active_fake_mode"):
        if hasattr(guards, name):
            patches.set(guards, name, unseen(getattr(guards, name)))

    @contextlib.contextmanager
    def loading() -> Iterator[None]:
        reading.depth = getattr(reading, "depth", 0) + 1
        try:
            with stage("load"):
                yield
        finally:
            reading.depth -= 1

    def load(zip_file: BinaryIO, *args: object, overall_storage: Any = None, **kwargs: object) -> object:
        with loading():
            return load_archive(zip_file, *args, **kwargs)

    def load_older(file: BinaryIO, map_location: Any, pickle_module: ModuleType, **options: object) -> object:
        before, reading.older = getattr(reading, "older", None), _OlderFile(pickle_module, books)
        try:
            with loading():
                return load_legacy(file, map_location, reading.older, **options)
        finally:
            reading.older = before

    def made(kind: Any, value: Any) -> object:
        """``typing.cast``, by which ``_legacy_load`` passes each new storage."""
        older = getattr(reading, "older", None)
        return older.storage(value.nbytes()) if older and isinstance(value, torch.UntypedStorage) else value

    load_archive, load_legacy = serialization._load, serialization._legacy_load
    patches.set(serialization, "_load", load)
    patches.set(serialization, "_legacy_load", load_older)
    patches.set(serialization, "cast", made)
    patches.set(
        serialization, "_open_zipfile_reader", lambda file: serialization._opener(ArchiveReader(file, books))
    )  # fmt: skip
    open_file = serialization._open_file
    patches.set(serialization, "_open_file", lambda name, mode: open_file(folder.place(name, mode), mode))


class ArchiveReader:
    """Stands for ``torch._C.PyTorchFileReader``, which it asks for all but the storages."""

    def __init__(self, file: BinaryIO, books: Books) -> None:
        self._reader = private("torch._C.PyTorchFileReader", _LOST)(file)
        self._books = books
        self._left = books.values.budget.one
        self._sizes, self._hollow = _directory(file)

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> object:
        """A storage of ``size`` bytes. Raises PyTorch's error for a record that is missing or of another size."""
        if self._sizes.get(name) != size:
            return self._reader.get_storage_from_record(name, size, kind)
        read = None
        if name not in self._hollow and size <= self._left:
            read = lambda: self._read(name, size)  # noqa: E731
        return FileStorage(self._books, size, read=read)

    def _read(self, name: str, size: int) -> bytes:
        self._left -= size
        content: bytes = self._reader.get_record(name)
        return content


def _directory(file: BinaryIO) -> tuple[dict[str, int], set[str]]:
    """Of an archive's records the bytes, and the names of those without values."""
    start = file.tell()
    with zipfile.ZipFile(_Rest(file)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    file.seek(start)
    sizes = {name: info.file_size for name, info in records.items()}
    return sizes, {name for name, info in records.items() if info.internal_attr == HOLLOW}


class _Rest:
    """A stream from where it stands, sought by places counted from its beginning: streams of
    ``torch.distributed.checkpoint`` know no other (``_ReaderView``, 2.13, takes places from the end the wrong way).
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start = file, file.tell()
        file.seek(0, os.SEEK_END)
        self._size = file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        offset += (0, self.tell(), self._size)[whence]
        self._file.seek(self._start + offset)
        return offset

    def tell(self) -> int:
        place: int = self._file.tell() - self._start
        return place

    def read(self, size: int = -1) -> bytes:
        left = self._size - self.tell()
        data: bytes = self._file.read(left if size < 0 else min(size, left))
        return data


class _OlderFile(types.SimpleNamespace):
    """A file of the format before archives while it is read; to PyTorch the module of pickle that reads it.

    The storages follow the pickled object, in the order of a list of keys.
    """

    def __init__(self, pickle_module: ModuleType, books: Books) -> None:
        super().__init__(**{name: getattr(pickle_module, name) for name in ("Unpickler", "__name__")})
        self._load, self._books = pickle_module.load, books
        self._keys: Iterator[str] = iter(())

    def load(self, file: BinaryIO, **options: object) -> object:
        found = self._load(file, **options)
        if isinstance(found, list):
            self._keys = iter(found)
        return found

    def storage(self, size: int) -> FileStorage:
        made = FileStorage(self._books, size, is_late=True)
        made.is_hollow_next = lambda: next(self._keys).startswith(HOLLOW_KEY)
        return made
