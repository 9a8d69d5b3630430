"""JSON documents that somebody else wrote: read with limits, and held against the types of the values they become.

A document may be truncated, nested deeper than the parser's stack, hold numbers of thousands of digits, or be a few
bytes that unpack to gigabytes; each of these is a ``ValueError`` here, which the caller turns into an error that names
the file.
"""

from __future__ import annotations

import gzip
import json
import types
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Bytes that a document may have, and one that was compressed.
LARGEST_DOCUMENT = 1 << 30
LARGEST_UNPACKED = 1 << 28
#: Whole numbers beyond this are no sizes, counts or addresses of anything.
LARGEST_NUMBER = 2**63 - 1


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises :class:`ValueError` with the reason in one line."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except ValueError:  # the interpreter's own limit on digits
        raise ValueError("it holds a number of too many digits") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises :class:`ValueError`, or :class:`OSError` for a file that cannot be read."""
    with path.open("rb") as file:
        return parse_json(_bounded(file, LARGEST_DOCUMENT))


def read_gzipped_json(path: Path) -> Any:
    """The value of a JSON file compressed by gzip. Raises as :func:`read_json`."""
    try:
        with gzip.open(path) as file:
            content = _bounded(file, LARGEST_UNPACKED)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"it is not a gzip file, or is cut off: {error}") from None
    return parse_json(content)


def _bounded(file: Any, limit: int) -> bytes:
    content: bytes = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 20} MiB")
    return content


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Hold ``values`` against the annotated types of the dataclass ``kind``. Raises :class:`ValueError` naming the
    first that does not fit; names that are missing, or are no field, are left to the constructor."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{shown(values)} is no {kind.__name__}")
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            raise ValueError(f"{name} is {shown(value)}")


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the annotated type. Whole numbers are of 64 bits; a truth value is none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if hint is Any or hint is object:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST_NUMBER
    if hint is float:
        return fits(value, int) or type(value) is float
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(fits(one, inner[0]) for one in value)
        return len(value) == len(inner) and all(fits(one, kind) for one, kind in zip(value, inner, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, hint)


def shown(value: Any) -> str:
    """A value in an error: short, whatever it is."""
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return "a number of more than 64 bits"
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
