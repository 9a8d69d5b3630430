"""Values as plain JSON and back: numbers, texts, tuples, mappings, members of enumerations and values of our own.

Reading makes nothing but the kinds that the reader names: a document of any content runs no code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any


class NotPlain(ValueError):
    """A value that has no plain form, or a document that has none of these values."""


def plain(value: Any) -> Any:
    """The plain form: equal values have equal ones, and tuples stay apart from lists. Raises :class:`NotPlain`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Enum):
        return ["member", type(value).__name__, value.name]
    if type(value) in (list, tuple, set, frozenset):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [type(value).__name__, *map(plain, items)]
    if isinstance(value, Mapping):
        return ["mapping", *([plain(key), plain(held)] for key, held in value.items())]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [
            "value",
            type(value).__name__,
            {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init},
        ]
    raise NotPlain(f"a {type(value).__name__}")


def restored(document: Any, kinds: Iterable[type]) -> Any:
    """The value of a plain form, whose own values are of these ``kinds``. Raises :class:`NotPlain`."""
    return _restored(document, {kind.__name__: kind for kind in kinds})


_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _restored(document: Any, kinds: Mapping[str, Any]) -> Any:
    if not isinstance(document, list):
        return document
    sort, *rest = document or [None]
    if sort in _SEQUENCES:
        return _SEQUENCES[sort](_restored(item, kinds) for item in rest)
    if sort == "mapping":
        return {_restored(key, kinds): _restored(held, kinds) for key, held in rest}
    if sort == "float":
        return float(rest[0])
    if sort in ("member", "value") and len(rest) == 2 and rest[0] in kinds:
        kind, held = kinds[rest[0]], rest[1]
        return kind[held] if sort == "member" else kind(**{name: _restored(one, kinds) for name, one in held.items()})
    raise NotPlain(f"an unknown sort of value: {sort!r:.50}")
