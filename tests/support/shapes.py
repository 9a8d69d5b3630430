"""Whether a JSON document is as :mod:`graphmem.reports.schemas` describes it: stricter than its schema, which allows
keys that are not described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphmem.reports.schemas import DOCUMENTS, PARTS, VERSIONS, least_of

_IS: Mapping[str, Any] = {
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "size": lambda value: type(value) is int and value >= 0,
    "whole": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "null": lambda value: value is None,
    "any": lambda value: True,
}


def differences(document: Mapping[str, Any]) -> list[str]:
    """The places where a document is not as described."""
    name, _, version = str(document["schema"]).removeprefix("graphmem.").partition("/")
    assert 1 <= int(version) <= VERSIONS.get(name, 1)
    return list(_differences(document, {"schema": "text", **DOCUMENTS[name]}, name))


def _differences(value: Any, shape: Any, place: str) -> Iterator[str]:
    if isinstance(shape, (tuple, str)):
        words = shape if isinstance(shape, tuple) else shape.split("|")
        found = [list(_of_word(value, word, place)) for word in words]
        if all(found):
            yield from min(found, key=lambda one: (one[0].startswith(f"{place}:"), len(one)))
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
            return
        if len(shape) > 1 and not least_of(shape) <= len(value) <= len(shape):
            yield f"{place}: {len(value)} places"
            return
        for number, one in enumerate(value):
            kind = shape[number if len(shape) > 1 else 0]
            yield from _differences(
                one, kind.removesuffix("?") if isinstance(kind, str) else kind, f"{place}[{number}]"
            )
    else:
        yield from _of_mapping(value, shape, place)


def _of_word(value: Any, word: Any, place: str) -> Iterator[str]:
    if not isinstance(word, str):
        yield from _differences(value, word, place)
    elif word.startswith("#"):
        name = word[1:]
        shape = PARTS[name] if name in PARTS else {"schema": "text", **DOCUMENTS[name]}
        yield from _differences(value, shape, place)
    elif not _IS[word](value):
        yield f"{place}: {value!r} is no {word}"


def _of_mapping(value: Any, shape: Mapping[str, Any], place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place}: {value!r} is no object"
        return
    known = {key.removesuffix("?"): one for key, one in shape.items() if key != "*"}
    for key in shape:
        if key != "*" and not key.endswith("?") and key not in value:
            yield f"{place} has no {key}"
    for key, one in value.items():
        if key in known or "*" in shape:
            yield from _differences(one, known.get(key, shape.get("*")), f"{place}.{key}")
        else:
            yield f"{place}.{key} is not described"
