"""The modules of a model as a tree, with the requested bytes of each at the peak.

Layers of a list that are made alike stand in one row, which has the bytes of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graphmem.base.records import dataclass
from graphmem.reports.document import Column, Section, Table, Text, section

if TYPE_CHECKING:
    from graphmem.estimate import Estimate
    from graphmem.trace import Operator, Storage, Trace

#: Rows that are shown at most; deeper modules count to those above them.
_MOST_ROWS = 40
#: Columns beside the name: the categories of each, and all others in the last.
COLUMNS = (("parameters", ("PARAMETER", "BUFFER")), ("gradients", ("GRADIENT",)), ("activations", ("ACTIVATION",)))
_NOWHERE = "(no module)"


class _Node:
    """A module: its children by name, and the bytes of its columns without theirs."""

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.own = [0] * (len(COLUMNS) + 1)

    def at(self, path: str) -> _Node:
        """The module at a path below this one, made where it is not there yet."""
        node = self
        for name in path.split(".") if path else ():
            node = node.children.setdefault(name, _Node())
        return node

    def bytes(self) -> list[int]:
        """The bytes of the columns, with the children's."""
        parts = [self.own, *(child.bytes() for child in self.children.values())]
        return [sum(column) for column in zip(*parts, strict=True)]

    def shape(self) -> tuple[object, ...]:
        """Its own parameters and the names below it, by which modules are alike."""
        return (self.own[0], *((name, child.shape()) for name, child in self.children.items()))

    def add(self, other: _Node) -> None:
        """Take the bytes of another one that is made alike."""
        self.own = [ours + theirs for ours, theirs in zip(self.own, other.own, strict=True)]
        for name, child in other.children.items():
            self.children[name].add(child)


@dataclass(frozen=True)
class _Row:
    depth: int
    name: str
    bytes: Sequence[int]


def section_of(estimate: Estimate) -> Section:
    """The tree at the peak; of an estimate without its events, that there is none."""
    title = "Modules at the peak (requested bytes)"
    if estimate.trace is None:
        return section(title, Text(["not known: the events of this run were not kept"]))
    root, nowhere = read(estimate.trace, estimate.moment.event)
    rows = [*_rows(root), _Row(0, _NOWHERE, nowhere)]
    whole = sum(root.bytes()) + sum(nowhere)
    named = (*(name for name, _ in COLUMNS), "other")
    columns = [Column("module"), *(Column(name, "bytes") for name in named), Column("of it", "share")]
    cells = [
        ("  " * row.depth + row.name, *(size or "" for size in row.bytes), sum(row.bytes) / max(1, whole))
        for row in rows
    ]
    return section(title, Table(columns, cells))


def owner(storage: Storage, made: Operator) -> str:
    """The path of the module that a storage is of: for a parameter, a buffer or a gradient that whose name it has, else
    the one that was running."""
    named = storage.category.name in ("PARAMETER", "BUFFER", "GRADIENT") and storage.label
    return storage.label.removesuffix(".grad").rpartition(".")[0] if named else made.module


def read(trace: Trace, event: int) -> tuple[_Node, list[int]]:
    """The root with the storages that live at an event, and the bytes of those of no module."""
    root, nowhere, makers = _Node(), _Node(), trace.births()
    for index in trace.live_at(event):
        storage = trace.storages[index]
        if storage.place.name != "DEVICE":
            continue
        category = storage.category.name
        path = owner(storage, trace.operators[makers[index]])
        column = next((at for at, (_, names) in enumerate(COLUMNS) if category in names), len(COLUMNS))
        (root.at(path) if path else nowhere).own[column] += storage.bytes
    return root, nowhere.own


def _rows(root: _Node) -> list[_Row]:
    """The rows of the tree, as deep as there is room for; each with what is below it."""
    depth, found = 1, list(_below(root, 1))
    while True:
        deeper = list(_below(root, depth + 1))
        if len(deeper) > _MOST_ROWS or len(deeper) == len(found):
            return found
        depth, found = depth + 1, deeper


def _below(node: _Node, room: int, depth: int = 0) -> Iterator[_Row]:
    if room == 0:
        return
    for name, child in _together(node):
        yield _Row(depth, name, child.bytes())
        yield from _below(child, room - 1, depth + 1)


def _together(node: _Node) -> Iterator[tuple[str, _Node]]:
    """The children, numbered ones that follow one another and are made alike as one."""
    group: list[tuple[str, _Node]] = []
    for name, child in node.children.items():
        if group and not (name.isdigit() and group[-1][0].isdigit() and child.shape() == group[-1][1].shape()):
            yield _summed(group)
            group = []
        group.append((name, child))
    if group:
        yield _summed(group)


def _summed(group: Sequence[tuple[str, _Node]]) -> tuple[str, _Node]:
    (first, node), (last, _) = group[0], group[-1]
    if len(group) == 1:
        return first, node
    total = _Node()
    for path, _ in paths(node):
        total.at(path)
    for _, one in group:
        total.add(one)
    return f"{first} to {last}", total


def paths(node: _Node, above: str = "") -> Iterator[tuple[str, _Node]]:
    """Every module below this one with its path."""
    for name, child in node.children.items():
        path = f"{above}.{name}" if above else name
        yield path, child
        yield from paths(child, path)
