"""The zoo's manifest: which models there are, and how each is built, fed and trained."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH = Path(__file__).with_name("manifest.toml")

#: The fields an entry may have; another one is a mistake in the manifest.
_FIELDS = {"name", "family", "model", "config", "task", "batch", "length", "side", "training"}


@dataclass(frozen=True)
class Entry:
    """One model of the zoo. ``length`` is in tokens, ``side`` in pixels; ``training`` holds fields of
    ``graphmem.Training``."""

    name: str
    family: str
    model: str
    batch: int
    task: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    length: int | None = None
    side: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """``transformers``, ``timm``, or ``torch`` for the models written here."""
        prefix = self.model.partition(":")[0]
        return prefix if prefix in ("transformers", "timm") else "torch"


@functools.cache
def entries(path: Path = PATH) -> tuple[Entry, ...]:
    """Every entry, in the manifest's order. Raises ``ValueError`` for an unknown field or a name used twice."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
    seen: set[str] = set()
    for table in tables:
        name = table.get("name", "?")
        if unknown := set(table) - _FIELDS:
            raise ValueError(f"{path.name}: {name} has unknown fields: {', '.join(sorted(unknown))}")
        if name in seen:
            raise ValueError(f"{path.name}: the name {name} is used twice")
        seen.add(name)
    return tuple(Entry(**table) for table in tables)


def entry(name: str) -> Entry:
    """The entry of that name. Raises ``KeyError`` with the closest names."""
    for candidate in entries():
        if candidate.name == name:
            return candidate
    close = difflib.get_close_matches(name, [candidate.name for candidate in entries()], n=3)
    raise KeyError(f"did you mean {' or '.join(close)}?" if close else "'graphmem zoo' lists the models")
