"""How answers are shown: the documents they are made into, and the formats that write documents down.

A format is a module of :mod:`graphmem.reports.formats`, or an object that an installed package names in the entry-point
group ``graphmem.reports``.
"""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from graphmem.base.files import write_whole
from graphmem.plugins import Kind
from graphmem.reports.document import Document


@runtime_checkable
class Format(Protocol):
    """A way to write any document down."""

    #: As ``--format`` names it.
    name: str
    #: Other names that are accepted.
    spellings: tuple[str, ...] = ()
    #: Ends of file names that ask for it.
    suffixes: tuple[str, ...] = ()
    #: Whether it is given all there is to say, as a page has room for, or what a screen shows.
    has_room: bool = True

    @abstractmethod
    def render(self, document: Document, width: int | None = None) -> str:
        """The document as text ending in a newline, in lines of at most ``width`` columns where it has lines."""


FORMATS: Kind[Format] = Kind(
    "report format",
    group="graphmem.reports",
    package="graphmem.reports.formats",
    attribute="FORMAT",
    protocol="graphmem.reports:Format",
    order=("text", "markdown", "json", "html", "csv", "notebook", "slurm", "kubernetes"),
)


def format_named(name: str) -> Format:
    """The format of this name. Raises :class:`graphmem.errors.UsageError` listing those there are."""
    return FORMATS.named(name)


def format_of_file(name: str) -> Format | None:
    """The format that the end of a file's name asks for; None for an end that none has."""
    return next((one for one in FORMATS.all() if name.lower().endswith(tuple(one.suffixes))), None)


class Answer:
    """An answer that can be shown: printed as its command prints it, in a notebook, in any format."""

    def document(self, *, details: bool = False) -> Document:
        """The document to show; ``details``: with all there is."""
        raise NotImplementedError

    def report(self, form: str = "text", width: int | None = None, **options: Any) -> str:
        """The answer in a format, ``text``, ``markdown``, ``html``, ``json``, ``csv`` or another package's, in lines of
        ``width`` columns. ``options`` are those of :meth:`document`. Raises :class:`graphmem.errors.UsageError` for a
        name that no format has."""
        found = format_named(form)
        return found.render(self.document(**{"details": found.has_room, **options}), width)

    def save(self, path: str | PathLike[str], form: str | None = None, **options: Any) -> None:
        """Write the answer into a file, whole or not at all, as :meth:`report` gives it: in the format of this name,
        else in that of the end of the file's name (``.html``, ``.md``, ``.json``, ``.csv``), else as text. Raises as
        :meth:`report` does, and where the file cannot be written."""
        found = format_named(form) if form else format_of_file(str(path)) or format_named("text")
        write_whole(Path(path), self.report(found.name, **options))

    def __str__(self) -> str:
        return format_named("text").render(self.document())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """What Jupyter, VS Code and Marimo ask for, each of which takes the richest that it can show."""
        forms = {"text/plain": "text", "text/markdown": "markdown", "text/html": "notebook"}
        return {kind: format_named(name).render(self.document()) for kind, name in forms.items()}


class Shown(Answer):
    """A document that is an answer of its own: a part of another's."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def document(self, *, details: bool = False) -> Document:
        """It, whatever is asked for."""
        return self._document

    def __repr__(self) -> str:
        return f"<{self._document.title}>"
