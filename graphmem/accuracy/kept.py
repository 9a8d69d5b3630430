"""Answers kept in a folder as they are made, so that a long comparison can be stopped and taken up again.

A file an answer, JSON, named by a digest of the question, of graphmem's own files and of the versions that predict:
another graphmem finds none of them. A file that cannot be read is no answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from graphmem.base.documents import check_fields, fits, read_json, shown

Item = TypeVar("Item")
Result = TypeVar("Result")

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Keeper(Generic[Item, Result]):
    """A function whose results, of the type ``gives``, are kept in ``folder``. ``maker``: what else they depend on."""

    function: Callable[[Item], Result]
    gives: type[Result]
    folder: Path
    maker: str

    def __call__(self, item: Item) -> Result:
        """The kept result of this item, or a new one, which is kept."""
        name = hashlib.sha256(f"{self.maker}\n{item!r}".encode()).hexdigest()
        path = self.folder / f"{name}.json"
        try:
            return read(self.gives, read_json(path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        made = self.function(item)
        if read(self.gives, plain(made)) != made:
            raise TypeError(f"{self.gives} does not come back as it was kept")
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(plain(made)), encoding="utf-8")
        unfinished.replace(path)
        return made


def digest_of_folder(folder: Path = _PACKAGE) -> str:
    """Of every file in a folder; of graphmem's own, so that the answers of an older one are not taken for its own."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def plain(value: object) -> object:
    """Values of JSON for dataclasses, sequences and mappings of them."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def read(kind: type[Result], value: object) -> Result:
    """The value of an annotated type, such as a dataclass. Raises ``ValueError``, ``TypeError``, ``KeyError`` or
    ``AttributeError`` for one of another type."""
    return typing.cast(Result, _read(kind, value))


def _read(hint: Any, value: Any) -> object:
    """A value of JSON as the type ``hint``: dataclasses, lists, tuples and mappings are made anew, all the way down.
    Raises :class:`ValueError` for one that does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_one_of(inner, value)
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        read = {name: _read(hints[name], one) for name, one in value.items()}
        check_fields(typing.cast(type, hint), read)
        return typing.cast(type, hint)(**read)
    if origin is list:
        return [_read(inner[0], one) for one in value]
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_read(kind, one) for kind, one in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _read(inner[1], one) for key, one in value.items()}
    if not fits(value, hint):
        raise ValueError(f"{shown(value)} is no {hint}")
    return value


def _read_one_of(kinds: tuple[object, ...], value: object) -> object:
    for kind in kinds:
        try:
            return _read(kind, value)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    raise ValueError(f"{shown(value)} is none of {kinds}")
