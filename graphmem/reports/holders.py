"""Who holds the requested bytes at the peak: modules and source lines, each with its bytes, the largest first.

Both are whole: they sum to what is alive on the device then. Modules of a list, such as the layers of a model, stand
together under one name, ``h.*.mlp``: the tables of deep models are short, and can be laid beside those of others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphmem.reports.tree import owner

if TYPE_CHECKING:
    from graphmem.trace import Trace

Holders = dict[str, dict[str, int]]


def holders(trace: Trace, event: int) -> Holders:
    """``modules`` and ``lines`` of the storages that live at an event -> their bytes; empty names are of none."""
    modules, lines, makers = Counter[str](), Counter[str](), trace.births()
    for index in trace.live_at(event):
        storage, made = trace.storages[index], trace.operators[makers[index]]
        if storage.place.name == "DEVICE" and storage.bytes:
            modules[owner(storage, made)] += storage.bytes
            lines[made.source] += storage.bytes
    return {"modules": dict(_folded(modules).most_common()), "lines": dict(lines.most_common())}


def _folded(modules: Counter[str]) -> Counter[str]:
    """The bytes with a ``*`` for each number that names a module with others in it."""
    outer = {path[:end] for path in modules for end, char in enumerate(path) if char == "."}
    found = Counter[str]()
    for path, size in modules.items():
        parts = path.split(".")
        folds = (part.isdigit() and ".".join(parts[: at + 1]) in outer for at, part in enumerate(parts))
        found[".".join("*" if fold else part for fold, part in zip(folds, parts, strict=True))] += size
    return found
