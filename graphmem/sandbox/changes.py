"""The changes that a program would have made to the user's files, read from where they went instead.

Both the kernel's overlays and ours keep them in *upper* trees that have the shape of the real ones: a changed file
stands at its path, a deleted one is marked. The kernel marks by a character device 0:0 and by an extended attribute of
a folder that hides the files below it (overlayfs.rst), ours by files named ``.wh.NAME`` and ``.wh..wh..opq``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphmem.sandbox.copies import is_folder

DELETED = ".wh."
OPAQUE = ".wh..wh..opq"
_ATTRIBUTES = ("user.overlay.", "trusted.overlay.")
#: Parts of a path that make it a program's own business: caches of compilers and libraries.
_CACHES = frozenset({"__pycache__", ".cache", ".triton", ".pytest_cache", ".config", ".keras", ".nv"})
#: Files that a report lists of one kind, at most; the totals count all.
LISTED = 10_000


@dataclass(frozen=True)
class Tree:
    """One upper folder: ``place`` is the path that the program sees, ``real`` and ``upper`` say where the real and the
    changed files are reached. ``own``: entries that were put there to build the view."""

    place: str
    real: str
    upper: str
    own: frozenset[str] = frozenset()


@dataclass(frozen=True)
class File:
    """A file that would have been written or deleted; ``before_bytes`` is the size of a file that it replaces."""

    path: str
    bytes: int
    before_bytes: int | None = None

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        found: dict[str, Any] = {"path": self.path, "bytes": self.bytes}
        return found if self.before_bytes is None else found | {"before_bytes": self.before_bytes}


@dataclass
class Changes:
    """Files that would have been written anew, overwritten, deleted and renamed; scratch files are only counted."""

    written: list[File] = field(default_factory=list)
    overwritten: list[File] = field(default_factory=list)
    deleted: list[File] = field(default_factory=list)
    renamed: list[tuple[str, File]] = field(default_factory=list)
    scratch_files: int = 0
    scratch_bytes: int = 0

    def as_json(self) -> dict[str, object]:
        """The value of ``details["sandbox"]["files"]`` of an estimate."""
        kept = [*self.written, *self.overwritten, *(file for _, file in self.renamed)]
        return {
            "count": len(kept),
            "bytes": sum(file.bytes for file in kept),
            "written": [file.as_json() for file in self.written[:LISTED]],
            "overwritten": [file.as_json() for file in self.overwritten[:LISTED]],
            "deleted": [file.as_json() for file in self.deleted[:LISTED]],
            "deleted_count": len(self.deleted),
            "deleted_bytes": sum(file.bytes for file in self.deleted),
            "renamed": [{"from": source, **file.as_json()} for source, file in self.renamed[:LISTED]],
            "scratch": {"count": self.scratch_files, "bytes": self.scratch_bytes},
        }


def changes_of(trees: Sequence[Tree], here: str, renames: Sequence[tuple[str, str]] = ()) -> Changes:
    """The changes in upper trees. ``here`` is the folder that the program was started in; ``renames`` are the renamings
    that were seen, in order, as (from, to)."""
    changes = Changes()
    scratch = _scratch_folders()
    for tree in trees:
        for kind, file in _Walk(tree).files():
            if _is_scratch(file.path, scratch, here):
                if kind != "deleted":
                    changes.scratch_files += 1
                    changes.scratch_bytes += file.bytes
            else:
                getattr(changes, kind).append(file)
    _join_renamed(changes, renames)
    for files in (changes.written, changes.overwritten, changes.deleted):
        files.sort(key=lambda file: (-file.bytes, file.path))
    return changes


def _scratch_folders() -> tuple[str, ...]:
    named = {os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"} | {tempfile.gettempdir()}
    return tuple(one.rstrip("/") + os.sep for one in named if one)


def _is_scratch(path: str, folders: Sequence[str], here: str) -> bool:
    if not _CACHES.isdisjoint(path.split(os.sep)[:-1]):
        return True
    # A user who works in a temporary folder wants to know what is written there.
    return path.startswith(tuple(folders)) and not path.startswith(here.rstrip(os.sep) + os.sep)


def _join_renamed(changes: Changes, renames: Sequence[tuple[str, str]]) -> None:
    """Record a renaming from one path to another as one change, not as deleted here and written there."""
    origin: dict[str, str] = {}
    for source, target in renames:
        moved = {
            target + path[len(source) :]: origin.pop(path)
            for path in list(origin)
            if path == source or path.startswith(source + os.sep)
        }
        origin.update({target: source} | moved)
    deleted = {file.path: file for file in changes.deleted}
    for kind in (changes.written, changes.overwritten):
        for file in list(kind):
            before = next(
                (origin[one] + file.path[len(one) :] for one in _and_parents(file.path) if one in origin), None
            )
            if before in deleted:
                kind.remove(file)
                changes.deleted.remove(deleted.pop(before))
                changes.renamed.append((before, file))


def _and_parents(path: str) -> Iterator[str]:
    while path and path != os.path.dirname(path):
        yield path
        path = os.path.dirname(path)


class _Walk:
    """The changes of one tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def files(self) -> Iterator[tuple[str, File]]:
        """(the list of :class:`Changes` that it belongs to, file)."""
        yield from self._folder(self._tree.place, self._tree.real, self._tree.upper, self._tree.own)
        for name in self._tree.own:
            if not os.path.lexists(os.path.join(self._tree.upper, name)):
                yield from _gone(os.path.join(self._tree.place, name), os.path.join(self._tree.real, name))

    def _folder(self, place: str, real: str, upper: str, own: frozenset[str]) -> Iterator[tuple[str, File]]:
        entries = _entries(upper)
        names = {entry.name for entry in entries}
        if OPAQUE in names or _attribute(upper, "opaque") == b"y":
            for name in set(os.listdir(real)) - names if is_folder(real) else ():
                yield from _gone(os.path.join(place, name), os.path.join(real, name))
        for entry in entries:
            name = entry.name
            if name in own or name == OPAQUE:
                continue
            if name.startswith(DELETED):
                name = name.removeprefix(DELETED)
                yield from _gone(os.path.join(place, name), os.path.join(real, name))
                continue
            status = entry.stat(follow_symlinks=False)
            at, before = os.path.join(place, name), os.path.join(real, name)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                yield from _gone(at, before)
            elif stat.S_ISDIR(status.st_mode):
                yield from self._changed_folder(at, before, entry.path)
            elif not stat.S_ISSOCK(status.st_mode):
                yield from _changed(at, before, status)

    def _changed_folder(self, place: str, real: str, upper: str) -> Iterator[tuple[str, File]]:
        if os.path.lexists(real) and not is_folder(real):
            yield from _gone(place, real)
        source = _attribute(upper, "redirect")
        if source is None:
            yield from self._folder(place, real, upper, frozenset())
            return
        # A renamed folder: its files stand where it was, and its changes here.
        moved = os.fsdecode(source)
        here = self._tree
        origin = here.real + moved if moved.startswith("/") else os.path.join(os.path.dirname(real), moved)
        seen = set()
        for kind, file in self._folder(place, origin, upper, frozenset()):
            seen.add(file.path)
            if kind != "deleted":
                yield "written", File(file.path, file.bytes)
        for found, size in _files_below(origin):
            path = place + found[len(origin) :]
            if path not in seen:
                yield "written", File(path, size)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _attribute(path: str, name: str) -> bytes | None:
    for prefix in _ATTRIBUTES if hasattr(os, "getxattr") else ():
        with contextlib.suppress(OSError):
            return os.getxattr(path, prefix + name)
    return None


def _changed(path: str, real: str, status: os.stat_result) -> Iterator[tuple[str, File]]:
    try:
        before = os.lstat(real)
    except OSError:
        yield "written", File(path, status.st_size)
        return
    if stat.S_ISDIR(before.st_mode):
        yield from _gone(path, real)
        yield "written", File(path, status.st_size)
        return
    kept = ("st_size", "st_mtime_ns", "st_mode")
    if any(getattr(before, name) != getattr(status, name) for name in kept):
        yield "overwritten", File(path, status.st_size, before.st_size)


def _gone(path: str, real: str) -> Iterator[tuple[str, File]]:
    for found, size in _files_below(real):
        yield "deleted", File(path + found[len(real) :], size)


def _files_below(path: str) -> Iterator[tuple[str, int]]:
    """(path, bytes) of a file, or of all below a folder; nothing where there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode):
        yield path, status.st_size
        return
    for entry in _entries(path):
        yield from _files_below(entry.path)


def count_of(refused: Counter[tuple[str, str]]) -> list[dict[str, object]]:
    """Refusals as plain values, the most frequent first."""
    return [{"what": what, "to": to, "times": times} for (what, to), times in refused.most_common()]
