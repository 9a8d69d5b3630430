"""Files of tensors that a program writes and reads again: they are kept in memory, as shapes, and never written.

``torch.save`` pickles the rest of an object for real, so that what cannot be pickled is the error that it is on a card,
and what is loaded is a copy. Of every storage it notes bytes and device; ``torch.load`` takes them anew, one after the
other, on the device that ``map_location`` names (``persistent_load`` and ``restore_location``, torch/serialization.py:
a storage is read to the host and copied whole). Files of safetensors are kept likewise. To the program such a file
exists, can be renamed, copied and removed; listing a folder shows it. What was on the disk before is read from there:
of weights in files of safetensors the header.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.program.absent_weights import absent_weights
from graphmem.capture.program.safetensors_files import SafeFile, saved_on_disk
from graphmem.capture.program.saved_tensors import Saved, Unpickler, placing

_TOKEN = b"graphmem saved object "
_TOKEN_BYTES = len(_TOKEN) + 32


class SavedFiles:
    """What was saved, by absolute path, and in open files by a token that stands in them."""

    def __init__(self, on_stage: Callable[[str], Any]) -> None:
        self._stage = on_stage
        self.files: dict[str, Saved] = {}
        self.absent: dict[str, Saved] = {}  # what a library is to find, and nobody has saved
        self._in_streams: dict[bytes, Saved] = {}

    # --- torch --------------------------------------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        """``torch.save``."""
        with self._stage("save"):
            saved = Saved.of(obj)
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
                return Unpickler(saved, placing(map_location)).load()

        return load

    def _in_stream(self, stream: Any) -> Saved | None:
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

    def _put(self, path: Any, saved: Saved) -> None:
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
            self._put(filename, Saved.of(({name: t.detach() for name, t in tensors.items()}, metadata)))

    def opening(self, original: Any) -> Callable[..., Any]:
        """``safetensors.safe_open``, for what was saved or is on the disk; ``original`` for other files."""

        def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
            saved = self.files.get(_key(filename)) or self.absent.get(_key(filename))
            if saved is None and framework in ("pt", "torch", "pytorch"):
                saved = saved_on_disk(Path(filename))
            if saved is None:
                return original(filename, framework, device=device, **options)
            return SafeFile(saved, device)

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


def _is_path(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike))


def _key(path: Any) -> str:
    return str(os.path.abspath(os.fspath(path)))


def _status(saved: Saved) -> os.stat_result:
    now = int(time.time())
    return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, saved.bytes, now, now, now))


@contextlib.contextmanager
def files_of_tensors(
    on_stage: Callable[[str], Any], remark: Callable[[str], None], *, whole_program: bool
) -> Iterator[None]:
    """Until the end what the step saves is kept. Only a whole program asks the file system about it."""
    saved, patches = SavedFiles(on_stage), Patches()
    try:
        _patch(patches, saved, whole_program=whole_program)
        with absent_weights(lambda path, held: saved.absent.update({_key(path): held}), remark):
            yield
    finally:
        patches.undo()


def _patch(patches: Patches, saved: SavedFiles, *, whole_program: bool) -> None:
    patches.set(torch, "save", saved.save)
    patches.set(torch, "load", saved.loading(torch.load))
    if find_spec("safetensors") is not None:
        original = import_module("safetensors").safe_open
        opening = saved.opening(original)
        for owner in _that_know("safe_open", original):
            patches.set(owner, "safe_open", opening)
    if not whole_program:
        return
    saved.patch_files(patches)
    if find_spec("safetensors") is not None:
        module = import_module("safetensors.torch")
        patches.set(module, "serialize_file", saved.serialize_file)
        for name in ("_flatten", "_flatten_as_ptr"):  # the newer name keeps no bytes
            if hasattr(module, name):
                patches.set(module, name, lambda tensors, *_: tensors)
        patches.set(module, "_filter_shared_not_shared", lambda tensors, _: tensors)  # it compares addresses


def _that_know(name: str, value: Any) -> Iterator[Any]:
    """The modules that have imported something by its name, or what stood in its place in an earlier capture."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) == value:
            yield module
