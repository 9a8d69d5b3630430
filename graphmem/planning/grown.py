"""What grew between two reports, by module and by source line.

A source line is known by its file and number, and an edit above it changes its number. So the lines of a file are laid
beside each other in their order: one by one where there are as many, else those that hold equally many bytes, unless
more of them do under their own numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, TypeAlias

Held: TypeAlias = Mapping[str, int]  # bytes by name
Change: TypeAlias = dict[str, int]
_Line: TypeAlias = "tuple[int, str, int]"  # number, name, bytes
_Pair: TypeAlias = "tuple[str | None, str | None]"  # the name before and after; None: there is none


def grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Change] | None]:
    """``modules`` and ``lines`` by name, each with its bytes before, after and their change, the largest change first;
    None where a report does not say them. A line that has moved is named ``model.py:7 -> 9``."""
    first, second = before.get("at_peak"), after.get("at_peak")
    if first is None or second is None:
        return {"modules": None, "lines": None}
    modules: list[_Pair] = [(name, name) for name in {**first["modules"], **second["modules"]}]
    return {
        "modules": _changes(first["modules"], second["modules"], modules),
        "lines": _changes(first["lines"], second["lines"], list(_same_lines(first["lines"], second["lines"]))),
    }


def _changes(before: Held, after: Held, pairs: Sequence[_Pair]) -> dict[str, Change]:
    found: dict[str, Change] = {}
    for old, new in pairs:
        row = found.setdefault(_named(old, new), {"before": 0, "after": 0, "change": 0})
        row["before"] += 0 if old is None else before.get(old, 0)
        row["after"] += 0 if new is None else after.get(new, 0)
        row["change"] = row["after"] - row["before"]
    return dict(sorted(found.items(), key=lambda item: (-abs(item[1]["change"]), -item[1]["after"])))


def _named(old: str | None, new: str | None) -> str:
    """Both names, the second without the file."""
    if old is None or new is None or old == new:
        return (old if new is None else new) or ""
    return f"{old} -> {new.rpartition(':')[2]}"


def _same_lines(before: Held, after: Held) -> Iterator[_Pair]:
    """Every line by its names."""
    files = dict.fromkeys(_file(name) for name in (*before, *after))
    for file in files:
        yield from _aligned(*(sorted(_lines_of(file, held)) for held in (before, after)))


def _file(name: str) -> str:
    """The file of a line; a name without a number is its own."""
    file, colon, number = name.rpartition(":")
    return file if colon and number.isdecimal() else name


def _lines_of(file: str, held: Held) -> Iterator[_Line]:
    for name, size in held.items():
        if _file(name) == file:
            yield int(name.rpartition(":")[2]) if name != file else 0, name, size


def _aligned(before: Sequence[_Line], after: Sequence[_Line]) -> Iterator[_Pair]:
    if len(before) == len(after):
        yield from ((old, new) for (_, old, _), (_, new, _) in zip(before, after, strict=True))
        return
    sizes = [[size for _, _, size in lines] for lines in (before, after)]
    blocks = SequenceMatcher(None, sizes[0], sizes[1], autojunk=False)
    if sum(block.size for block in blocks.get_matching_blocks()) <= len({*before} & {*after}):
        yield from ((name, name) for name in dict.fromkeys(name for _, name, _ in (*before, *after)))
        return
    for kind, start, end, new_start, new_end in blocks.get_opcodes():
        old, new = ([name for _, name, _ in part] for part in (before[start:end], after[new_start:new_end]))
        if kind in ("equal", "replace") and len(old) == len(new):
            yield from zip(old, new, strict=True)
        else:
            both = dict.fromkeys([*old, *new])
            yield from ((name if name in old else None, name if name in new else None) for name in both)
