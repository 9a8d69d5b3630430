"""In words: the files that a whole program would have changed, and the connections that it was refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from graphmem.reports.document import Section, Text, section, table
from graphmem.units import format_bytes

#: How a mechanism keeps files, by its name in ``details["sandbox"]``.
_MECHANISMS = {
    "namespace": "an overlay in a mount namespace",
    "landlock": "Python's wrapped calls; Landlock keeps other programs from writing",
    "wrapped": "Python's wrapped calls",
}
_SHOWN = 5


def section_of(flight: Mapping[str, Any]) -> Section:
    """The totals, the files, and how they were kept."""
    first, *others = _lines(flight)
    files = table({"size": "figure", "change": "", "path": ""}, _rows(flight))
    return section("Files that the program would have changed (none was)", Text([first]), files, Text(others))


def _lines(flight: Mapping[str, Any]) -> Iterator[str]:
    """The totals, what was refused, and how files were kept, each as one line."""
    files, scratch = flight["files"], flight["files"]["scratch"]
    yield (
        f"disk: {_counted(files['count'], files['bytes'])} written, of which {_parts(files)}"
        if files["count"]
        else ("disk: nothing written")
    )
    if files["deleted_count"]:
        yield f"deleted: {_counted(files['deleted_count'], files['deleted_bytes'])}"
    if scratch["count"]:
        yield f"scratch: {_counted(scratch['count'], scratch['bytes'])} in caches and temporary folders"
    for folder in flight["allowed"]:
        yield f"really written: what the program writes below {folder}; weights that it saves there are zeros"
    for one in flight["refused"][:_SHOWN]:
        yield f"refused to {one['what']} {one['to']}{_times(one['times'])}"
    if len(flight["refused"]) > _SHOWN:
        yield f"refused besides: {len(flight['refused']) - _SHOWN}"
    started = sorted(flight["started"])
    if started:
        rest = f" and {len(started) - 1} more" if len(started) > 1 else ""
        yield f"started, on the real files and without leave to change them: {started[0]}{rest}"
    yield f"kept by {_MECHANISMS[flight['mechanism']]}{_unavailable(flight['unavailable'])}"


def summary(flight: Mapping[str, Any]) -> str:
    """One sentence: the files that would have been changed; "" where there are none."""
    files = flight["files"]
    written = f"{_counted(files['count'], files['bytes'])} would be written" if files["count"] else ""
    deleted = f"{_counted(files['deleted_count'], files['deleted_bytes'])} deleted" if files["deleted_count"] else ""
    said = ", ".join(filter(None, (written, deleted)))
    return f"Disk: {said}; none was changed." if said else ""


def _rows(flight: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(size, what would have been done, path) of the files, the largest first. Paths below the folder that the program
    was started in are shown from there."""
    files, below = flight["files"], flight["folder"].rstrip("/\\") + os.sep
    found = [
        *((one["bytes"], "written", one["path"]) for one in files["written"]),
        *((one["bytes"], "overwritten", one["path"]) for one in files["overwritten"]),
        *((one["bytes"], "renamed", f"{one['from']} -> {one['path']}") for one in files["renamed"]),
        *((one["bytes"], "deleted", one["path"]) for one in files["deleted"]),
    ]
    found.sort(key=lambda row: -row[0])
    return [(format_bytes(size), kind, path.replace(below, "")) for size, kind, path in found]


def _counted(count: int, size: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}, {format_bytes(size)}"


def _parts(files: Mapping[str, Any]) -> str:
    names = ("written", "overwritten", "renamed")
    words = {"written": "new", "overwritten": "overwritten", "renamed": "renamed"}
    return ", ".join(f"{len(files[name])} {words[name]}" for name in names if files[name])


def _times(count: int) -> str:
    return "" if count == 1 else f" ({count} times)"


def _unavailable(reasons: Mapping[str, str]) -> str:
    return "".join(f"; no {name}: {reason}" for name, reason in reasons.items())
