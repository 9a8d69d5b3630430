"""Command lines as vLLM's own parser reads them (``FlexibleArgumentParser``, utils/argparse_utils.py, 0.32).

Names may have underscores; ``--option.key value`` is an entry of the object that the option takes; ``-O3`` and
``-O.key`` are options too; an option may have several values; and ``--config FILE`` has more of them, as YAML, which
are weaker than those of the command line.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmem.base.documents import read_yamls
from graphmem.errors import SourceError, UsageError, reading

#: Options of one letter or two that take an object -> the long ones.
_OBJECTS = {
    "-O": "--compilation-config", "-cc": "--compilation-config", "-sc": "--speculative-config",
    "-ac": "--attention-config",
}  # fmt: skip
#: Options that take several values.
_SEVERAL = ("--cudagraph-capture-sizes", "--cuda-graph-sizes", "--lora-modules", "--middleware")


def as_options(words: Sequence[str]) -> list[str]:
    """The words with every option once, spelled with dashes, and objects as JSON. Raises :class:`UsageError` for a
    file of options that cannot be read."""
    objects: dict[str, dict[str, Any]] = {}
    found: list[str] = []
    expanded = list(_with_dashes([*_of_files(words)]))
    at = 0
    while at < len(expanded):
        word = expanded[at]
        name, equals, value = word.partition("=")
        at += 1
        if not word.startswith("-"):
            found.append(word)
        elif "." in name and not name.lstrip("-").replace(".", "").isdigit():
            if not equals:
                value = expanded[at] if at < len(expanded) else ""
                at += 1
            option, *keys = name.split(".")
            _put(objects.setdefault(_OBJECTS.get(option, option), {}), keys, value)
        elif name in _SEVERAL:
            values = [value] if equals else []
            while at < len(expanded) and not expanded[at].startswith("-"):
                values.append(expanded[at])
                at += 1
            found += [name, " ".join(values)]
        else:
            found.append(word)
    for option, entries in objects.items():
        _put_object(found, option, entries)
    return found


def _of_files(words: Sequence[str]) -> Iterator[str]:
    """The words, and those of the files that ``--config`` names behind them."""
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    files: list[str] = []
    waiting = False
    for word in words:
        name, equals, value = word.partition("=")
        if waiting:
            files.append(word)
        elif name == "--config" and equals:
            files.append(value)
        elif name != "--config":
            yield word
        waiting = name == "--config" and not equals and not waiting
    for file in files:
        for key, value in _options_in(Path(file)).items():
            option = f"--{str(key).replace('_', '-')}"
            if option not in given and value is not None and value is not False:
                yield from (option, *_as_words(value))


def documents_in(path: Path) -> list[Any]:
    """The documents of a YAML file. Raises :class:`SourceError`."""
    try:
        with reading(path):
            return read_yamls(path)
    except ImportError:
        raise SourceError(f"{path}: YAML is read with PyYAML; install it with: pip install pyyaml") from None
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None


def _options_in(path: Path) -> Mapping[Any, Any]:
    documents = documents_in(path)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise UsageError(f"{path} is no file of options: a mapping of their names to values")
    return documents[0]


def _as_words(value: object) -> list[str]:
    """An option's value as words: none of a switch, several of a list."""
    if value is True:
        return []
    if isinstance(value, list):
        return [str(one) for one in value]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]


def _with_dashes(words: Sequence[str]) -> Iterator[str]:
    """Names with dashes up to the first dot, and the optimization level as an option with its value."""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            first, dot, rest = name.partition(".")
            yield f"{first.replace('_', '-')}{dot}{rest}{equals}{value}"
        elif word == "-O":
            yield "--optimization-level"
        elif word.startswith("-O") and not word.startswith("-O."):
            yield from ("--optimization-level", word[2:].lstrip("="))
        else:
            yield word


def _put(values: dict[str, Any], keys: Sequence[str], text: str) -> None:
    """``text``, which may be JSON, at a path of keys."""
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        values = inner if isinstance(inner, dict) else {}
    try:
        values[keys[-1]] = json.loads(text)
    except (ValueError, RecursionError):
        values[keys[-1]] = text


def _put_object(words: list[str], option: str, values: dict[str, Any]) -> None:
    """An option whose entries were given one by one; where it was given as a whole too they are put into that."""
    at = words.index(option) + 1 if option in words[:-1] else 0
    with contextlib.suppress(ValueError, TypeError, RecursionError):  # what is no object is told by who reads it
        if at:
            words[at] = json.dumps({**json.loads(words[at]), **values})
            return
    words += [option, json.dumps(values)]
