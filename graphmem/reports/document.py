"""A document: the answer to a question as plain values, without how it is shown.

It is sections of blocks: sentences, lists, names with values, tables, shares of a whole, curves, points, pictures.
What makes an answer into one does all the arithmetic; the formats (:mod:`graphmem.reports.formats`, and those of other
packages) only write it down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from graphmem.base.records import dataclass
from graphmem.units import format_bytes, format_seconds

#: Columns of a text where nobody says how many.
WIDTH = 80

#: Unit of a column -> its figures in words. A column without a unit holds words.
UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "exact": lambda size: f"{size:,} B",
    "change": lambda size: f"{'+' if size > 0 else ''}{format_bytes(size)}",
    "decimal": lambda size: f"{size / 1e9:,.1f} GB" if size else "-",
    "count": lambda number: f"{number:,}",
    "share": lambda part: f"{100 * part:.1f} %",
    "seconds": lambda time: f"{time:.2f}",
    "time": format_seconds,
    "dollars": lambda price: f"${price:,.2f}",
    "figure": str,
}

#: Characters after which a text that is too long is cut.
_BETWEEN_WORDS = " /._:,;-"

Value: TypeAlias = "str | int | float | None"


@dataclass(frozen=True)
class Column:
    """A column of a table. ``unit``: one of :data:`UNITS`, whose figures stand to the right and are never broken; none
    for words. ``wraps``: whether words are folded where there is no room; ``name``: what programs call a column that
    needs no title (``fits``: of verdicts, which may be coloured); ``bars``: whether a page draws its figures too, in
    one scale with the other columns of its unit."""

    title: str = ""
    unit: str = ""
    wraps: bool = True
    name: str = ""
    bars: bool = False

    @property
    def has_figures(self) -> bool:
        """Whether figures stand in it."""
        return bool(self.unit)

    @property
    def key(self) -> str:
        """The title as programs read it, with the unit: ``device_bytes``."""
        unit = {"exact": "bytes", "change": "bytes", "decimal": "bytes", "time": "seconds"}.get(self.unit, self.unit)
        name = (self.title or self.name).replace(" ", "_")
        return "_".join(filter(None, (name, unit if unit in ("bytes", "seconds", "dollars") else "")))

    def words(self, value: Value) -> str:
        """A value of the column for people; None is nothing, and a text is itself."""
        if value is None or isinstance(value, str):
            return value or ""
        return UNITS[self.unit or "figure"](value)


@dataclass(frozen=True)
class Text:
    """Sentences, each a line or a paragraph. ``tone``: ``yes`` or ``no`` of a verdict, else empty."""

    lines: Sequence[str]
    tone: str = ""


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names with what they are. A name that begins with blanks is a part of the one above it."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of as many values as there are columns; titles are left out where no column has one."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the columns; empty where there are none."""
        titles = tuple(column.title for column in self.columns)
        return titles if any(titles) else ()

    def words(self) -> list[tuple[str, ...]]:
        """The rows for people."""
        return [tuple(c.words(value) for c, value in zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Shares:
    """The parts of a whole: (name, bytes, note) each. ``total``: name and bytes of their sum. A part without bytes and
    note is not shown, and keeps its place in the order of colours. ``edge``: the name and the bytes of the room that
    the whole should stay in; ``as_bars``: a line of text has a bar for each part instead of its bytes exactly;
    ``room``: bytes that the width of a page's bars is at least, so that several pictures have one scale."""

    parts: Sequence[tuple[str, int, str]]
    total: tuple[str, int]
    edge: tuple[str, int] | None = None
    as_bars: bool = False
    room: int = 0

    def table(self) -> Table:
        """The parts and their sum as rows: name, bytes in short and exactly, share of the whole, note."""
        whole = self.total[1]
        shown = [(*part, part[1] / whole if whole else None) for part in self.shown()]
        rows = [(name, size, size, "-" if share is None else share, note) for name, size, note, share in shown]
        rows.append((*self.total, whole, 1.0 if whole else "-", ""))
        units = (("part", ""), ("", "bytes"), ("exact", "exact"), ("share", "share"), ("note", ""))
        columns = [Column(unit=unit, name=name) for name, unit in units]
        if any(note for _, _, note in self.parts):
            return Table(columns, rows)
        return Table(columns[:-1], [row[:-1] for row in rows])

    def shown(self) -> list[tuple[str, int, str]]:
        """The parts that there is something to say of."""
        return [part for part in self.parts if part[1] or part[2]]

    def largest(self, count: int) -> list[tuple[str, int]]:
        """(name, bytes) of ``count`` parts in their order: the largest, and where there are more, the rest as one."""
        shown = [(name, size) for name, size, _ in self.shown()]
        if len(shown) <= count:
            return shown
        kept = sorted(shown, key=lambda part: part[1], reverse=True)[: count - 1]
        rest = sum(size for _, size in shown) - sum(size for _, size in kept)
        return [*(part for part in shown if part in kept), (f"{len(shown) - len(kept)} others", rest)]


@dataclass(frozen=True)
class Stack:
    """A whole as a bar: its name, the bytes of each of its parts, and whether it fits, in words."""

    name: str
    sizes: Sequence[int]
    verdict: str = ""


@dataclass(frozen=True)
class Stacks:
    """Wholes of the same ``parts``, a bar each in one scale, which are compared with the first: of a smaller one, what
    is gone is seen too. ``edge``: the name and the bytes of the room that they should stay in. Formats without pictures
    leave them out: tables have the same figures."""

    parts: Sequence[str]
    rows: Sequence[Stack]
    edge: tuple[str, int] | None = None


@dataclass(frozen=True)
class Cell:
    """A figure of a heat map: bytes (None: there is none, for the reason in ``verdict``), whether they fit, in words,
    the bytes of the room they should stay in (0: none is known), and the case of :class:`Choices` that it is of."""

    size: int | None
    verdict: str
    room: int
    case: tuple[str, ...]


@dataclass(frozen=True)
class HeatMap:
    """Figures over two settings, coloured the stronger the fuller their room (or without one, the nearer to ``most``).
    ``down`` and ``across``: the settings' names, each with its values; ``cells`` by a value of each; ``caption``: what
    else is set. Formats without pictures leave it out: tables have the same figures."""

    down: tuple[str, Sequence[str]]
    across: tuple[str, Sequence[str]]
    cells: Mapping[tuple[str, str], Cell]
    most: int
    caption: str = ""


@dataclass(frozen=True)
class Curve:
    """Values over time, at least one; ``name``: of which quantity."""

    name: str
    values: Any  # a sequence of numbers, or an array


@dataclass(frozen=True)
class Curves:
    """Curves over the same time, from ``begins`` to ``ends``, in one ``unit``. ``over``: where the values stand, with
    the name of what is counted there; without it they follow one another. ``at``: the index of a moment, with its name;
    ``limit``: a value that they must not pass, with its name; ``marks``: indices where ``marked`` happened.
    ``caption``: what else there is to say. ``brief``: whether a line of characters tells enough of the first curve;
    ``doubling``: whether both axes are drawn by powers, for values that double from one to the next."""

    curves: Sequence[Curve]
    begins: str
    ends: str
    unit: str
    at: tuple[int, str] | None = None
    limit: tuple[float, str] | None = None
    marks: Sequence[int] = ()
    marked: str = ""
    caption: str = ""
    brief: bool = False
    over: tuple[Sequence[float], str] | None = None
    doubling: bool = False


@dataclass(frozen=True)
class Points:
    """Choices by two figures: ``groups`` of (x, y, name), each under its name; an empty one is not shown, and keeps its
    place in the order of shapes and colours. ``axes``: of what the figures are, with their units; ``limit``: an x that
    they must not pass, with its name; ``chosen``: the name of one that is marked. Formats without pictures leave them
    out: tables have the same figures."""

    axes: tuple[Column, Column]
    groups: Sequence[tuple[str, Sequence[tuple[float, float, str]]]]
    limit: tuple[float, str] | None = None
    chosen: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Moments:
    """A run that can be looked at at each of its events. ``tables`` gives what lives when, as plain values
    (:mod:`graphmem.reports.moments`), to the formats that can show it; the others leave it out."""

    tables: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Choices:
    """Blocks for each of several settings, of which a page shows one at a time, as they are chosen there; other formats
    leave them out. ``axes``: the settings' names, each with its values in order; ``cases``: the blocks by one value of
    each; ``first``: the case that is shown first."""

    axes: Sequence[tuple[str, Sequence[str]]]
    cases: Mapping[tuple[str, ...], Sequence[Block]]
    first: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """A file to be copied: its name and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Picture:
    """A plot, drawn as SVG text when a format shows it; those that show no pictures leave it out."""

    name: str
    svg: Callable[[], str]


Block: TypeAlias = (
    Text | Items | Facts | Table | Shares | Stacks | HeatMap | Curves | Points | Moments | Choices | Code | Picture
)


@dataclass(frozen=True)
class Section:
    """Blocks under a title; without one they stand for themselves."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """An answer. ``kind`` is one word for what it is of (``estimate``, ``plan``); ``data`` gives the answer as plain
    values, the JSON document. ``rows``: the answer as rows for a spreadsheet, where these are more than what its tables
    show; else ``about`` stands before these. ``width``: columns of its text; ``height``: lines that it is kept to by
    showing fewer parts of a whole, where it can be."""

    kind: str
    title: str
    sections: Sequence[Section]
    data: Callable[[], Mapping[str, Any]]
    rows: Table | None = None
    width: int = WIDTH
    about: Table | None = None
    height: int | None = None

    def tables(self) -> list[Table]:
        """The tables of a spreadsheet: ``rows``, or ``about`` and every table that is shown."""
        if self.rows is not None:
            return [self.rows]
        blocks = [block for section in self.sections for block in section.blocks]
        found = (block.table() if isinstance(block, Shares) else block for block in blocks)
        return [*filter(None, (self.about,)), *(block for block in found if isinstance(block, Table))]


def section(title: str, *blocks: Block) -> Section:
    """A section of these blocks."""
    return Section(title, blocks)


def table(columns: Mapping[str, str], rows: Sequence[Sequence[Value]], *, titled: bool = False) -> Table:
    """A table of columns by name, each with its unit (empty: words). The names are for programs, or ``titled`` the
    titles."""
    made = (Column(name, unit) if titled else Column(unit=unit, name=name) for name, unit in columns.items())
    return Table(tuple(made), rows)


def shortened(text: str, length: int) -> str:
    """The text, or its beginning and its end with dots between them, of at most ``length`` characters. Words stay
    whole, unless one is longer than half of its side."""
    if len(text) <= length:
        return text
    end = length // 3
    at = length - end - 3
    places = [place for place in range(1, len(text)) if text[place - 1] in _BETWEEN_WORDS]
    head = text[: max((place for place in places if at // 2 <= place <= at), default=at)].rstrip()
    room = length - 3 - len(head)
    first = len(text) - room
    tail = text[min((place for place in places if first <= place <= len(text) - end // 2), default=len(text) - end) :]
    return f"{head}...{tail}"


def clean(text: object) -> str:
    """Text of users and files made safe to show: everything not printable becomes ``?``."""
    return "".join(char if char.isprintable() else "?" for char in str(text))
