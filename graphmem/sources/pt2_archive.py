"""The archive that ``torch.export.save`` writes, read without PyTorch: which files it has, and the small ones' bytes.

A ``.pt2`` file is a zip archive. From PyTorch 2.8 on its files lie under one folder (``torch/export/pt2_archive``):
``models/model.json`` is the program, ``data/weights/model_weights_config.json`` the sizes of its weights beside the
weights themselves; up to 2.7 ``serialized_exported_program.json`` is the program, and weights are one pickle. Of these
only JSON and small constants are read: pickles can run any program, and weights are not needed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmem.base.documents import open_file, parse_json
from graphmem.errors import SourceError

#: Bytes of a JSON file in the archive, and of one that is compressed (PyTorch compresses nothing).
LARGEST_JSON = 512 << 20
LARGEST_COMPRESSED = 64 << 20
#: Bytes of a constant whose values are read, since sizes may follow from them.
KEPT_CONSTANT_BYTES = 1024
_LEGACY_PROGRAM = "serialized_exported_program.json"
_COMPILED = "data/aotinductor/"


@dataclass(frozen=True)
class Archive:
    """``program`` is the document of the program, ``weights`` and ``constants`` those of its payloads, by their names
    in the model (empty in the layout up to PyTorch 2.7); ``values`` are the bytes of small constants by file."""

    program: object
    weights: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)


def read_archive(path: Path) -> Archive:
    """The documents of the archive at ``path``. Raises :class:`SourceError`."""
    with _opened(path) as archive:
        names = set(archive.namelist())
        if any(_COMPILED in name for name in names):
            raise SourceError(
                f"{path} holds code compiled by AOTInductor, which would have to run; give what torch.export.save wrote"
            )
        if _LEGACY_PROGRAM in names:
            return Archive(_document(archive, _LEGACY_PROGRAM, path))
        programs = sorted(name for name in names if name.split("/", 1)[-1] == "models/model.json")
        if not programs:
            raise SourceError(f"{path} is not a program saved by torch.export.save: it has no models/model.json")
        root = programs[0].removesuffix("models/model.json")
        weights = _payloads(archive, f"{root}data/weights/model_weights_config.json", path)
        constants = _payloads(archive, f"{root}data/constants/model_constants_config.json", path)
        values = dict(_small_constants(archive, f"{root}data/constants/", path))
        return Archive(_document(archive, programs[0], path), weights, constants, values)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    wrong = f"{path} is not a program saved by torch.export.save, or is cut off"
    try:
        with open_file(path, pipes=False) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except SourceError:
        raise
    except zipfile.BadZipFile:
        raise SourceError(f"{wrong}: it is no zip archive, or a damaged one") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, NotImplementedError, RuntimeError, ValueError, UnicodeDecodeError, OverflowError) as error:
        raise SourceError(f"{wrong}: {error}") from None
    except Exception as error:  # zlib.error, lzma.LZMAError, struct.error: whatever damaged entries raise
        raise SourceError(f"{wrong}: {type(error).__name__}: {error}") from None


def _document(archive: zipfile.ZipFile, name: str, path: Path) -> object:
    try:
        return parse_json(_content(archive, name, LARGEST_JSON, path))
    except ValueError as error:
        raise SourceError(f"{path}: {name}: {error}") from None


def _payloads(archive: zipfile.ZipFile, name: str, path: Path) -> dict[str, object]:
    """The table of payloads, empty where there is none."""
    if name not in archive.NameToInfo:
        return {}
    document = _document(archive, name, path)
    config = document.get("config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        raise SourceError(f"{path}: {name} is not a table of payloads")
    return config


def _small_constants(archive: zipfile.ZipFile, folder: str, path: Path) -> Iterator[tuple[str, bytes]]:
    for info in archive.infolist():
        name = info.filename.removeprefix(folder)
        is_raw = name != info.filename and name.startswith("tensor_")
        if is_raw and 0 < info.file_size <= KEPT_CONSTANT_BYTES:
            yield name, _content(archive, info.filename, KEPT_CONSTANT_BYTES, path)


def _content(archive: zipfile.ZipFile, name: str, limit: int, path: Path) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        limit = min(limit, LARGEST_COMPRESSED)
    with archive.open(info) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise SourceError(f"{path}: {name} is larger than {limit >> 20} MiB")
    return content
