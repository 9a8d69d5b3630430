"""Two reports side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from graphmem.base.addresses import refuse_address
from graphmem.base.documents import fits, read_json
from graphmem.diagnostics import CUT_SHORT, MEANINGS
from graphmem.errors import SourceError
from graphmem.estimate import LEVELS, SCHEMA, Estimate, Fit
from graphmem.planning.grown import grown
from graphmem.reports import Answer
from graphmem.reports.document import Column, Document, Facts, Section, Stack, Stacks, Table, Text, Value, section
from graphmem.reports.estimate import WORDS
from graphmem.units import format_bytes

_ABOUT = ("model", "step", "runtime", "allocator", "gpu")
_UNITS = {"before": "bytes", "after": "bytes", "change": "change"}
_FIGURES = tuple(Column(name, unit, bars=True) for name, unit in _UNITS.items())
#: Codes of what ended a run early.
_CUT_SHORT = {code.name.lower() for code, meaning in MEANINGS.items() if meaning.cause == CUT_SHORT}
_COLUMNS = (Column(name="part"), *_FIGURES)

#: Modules and lines that changed most, on a screen; and with details.
_SHOWN, _MOST_SHOWN = 6, 40


@dataclass(frozen=True)
class Comparison(Answer):
    """Two reports; ``values`` has all figures before and after, and their changes, in bytes."""

    values: Mapping[str, Any]

    @property
    def growth_bytes(self) -> int:
        """By how much device memory grew; negative where it shrank."""
        return int(self.values["peak"]["device"]["change"])

    def growth_over(self, allowed: int | float) -> int | None:
        """The bytes of growth that are allowed, if it is more: as bytes, or as a share of what was needed before."""
        most = allowed if isinstance(allowed, int) else int(allowed * self.values["peak"]["device"]["before"])
        return most if self.growth_bytes > most else None

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem compare``; with ``details`` every module and line that changed."""
        return _document(self.values, _MOST_SHOWN if details else _SHOWN)

    def __repr__(self) -> str:
        return f"<Comparison: {self.growth_bytes:+,} bytes>"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.comparison/1``; memory in bytes)."""
        return dict(self.values)


def compare(before: Estimate | str | PathLike[str], after: Estimate | str | PathLike[str]) -> Comparison:
    """Compare two estimates, or files that ``graphmem analyze --format json`` wrote. Raises :class:`SourceError`."""
    first, second = (one.to_dict() if isinstance(one, Estimate) else _read(str(one)) for one in (before, after))
    return Comparison(
        {
            "schema": "graphmem.comparison/1",
            "before": {name: first[name] for name in _ABOUT},
            "after": {name: second[name] for name in _ABOUT},
            "fits": {"before": _fits(first), "after": _fits(second)},
            "ended_early": {"before": _ended_early(first), "after": _ended_early(second)},
            "card": _card(first, second),
            "peak": {name: _change(first["peak"], second["peak"], f"{name}_bytes") for name in LEVELS},
            "breakdown": {
                name: _change(first["breakdown"], second["breakdown"], name)
                for name in {**first["breakdown"], **second["breakdown"]}
            },
            **grown(first, second),
        }
    )


def _document(compared: Mapping[str, Any], most: int) -> Document:
    """Before, after and change of every level and of its parts, and of ``most`` modules and source lines."""
    before, after, fits, ends = (compared[name] for name in ("before", "after", "fits", "ended_early"))
    about = [(name, _changed(before[name], after[name])) for name in _ABOUT]
    if any(fits.values()):
        about.append(("fits", _changed(*(fits[when] or "no card" for when in ("before", "after")))))
    peaks = [(name, *row.values()) for name, row in compared["peak"].items()]
    parts = [
        (WORDS.get(name, name), *row.values())
        for name, row in compared["breakdown"].items()
        if row["before"] or row["after"]
    ]
    least = [f"The run {when} ended early: its figures are the least." for when in ends if ends[when]]
    sections = (
        section("", Text([_growth(compared), *least], _tone(fits["after"]))),
        section("", Facts(about)),
        section("Peak memory", Table(_COLUMNS, peaks)),
        section("What it is made of at the peak", _side_by_side(compared), Table(_COLUMNS, parts)),
        *(one for name, title in _BY.items() for one in _changes_by(title, compared[name], most)),
    )
    return Document("comparison", "Two reports side by side", sections, lambda: dict(compared))


def _side_by_side(compared: Mapping[str, Any]) -> Stacks:
    """Both as bars of the same parts."""
    parts, card = compared["breakdown"], compared["card"]
    rows = [Stack(when, [row[when] for row in parts.values()]) for when in ("before", "after")]
    names = [WORDS.get(name, name).partition(" (")[0] for name in parts]
    return Stacks(names, rows, card and (card["gpu"], card["bytes"]))


#: What changes are told by, and the titles of the names.
_BY = {"modules": "module", "lines": "source line"}


def _changes_by(title: str, changes: Mapping[str, Mapping[str, int]] | None, most: int) -> Iterator[Section]:
    """What changed by ``title``, the most first, and the rest in one row."""
    changed = [(name or f"(no {title})", row) for name, row in (changes or {}).items() if row["change"]]
    if not changed:
        return
    rest = [row for _, row in changed[most - 1 :]] if len(changed) > most else []
    shown: list[tuple[Value, ...]] = [(name, *row.values()) for name, row in changed[: len(changed) - len(rest)]]
    if rest:
        shown.append((f"{len(rest)} others", *(sum(row[name] for row in rest) for name in rest[0])))
    columns = (Column(title), *_FIGURES)
    yield section(f"What changed at the peak by {title} (requested bytes)", Table(columns, shown))


def _growth(compared: Mapping[str, Any]) -> str:
    """In a sentence, by how much device memory changes, and what of it changes most."""
    before, after, change = compared["peak"]["device"].values()
    if not change:
        return f"Device memory stays at {format_bytes(after)}."
    share = f" ({100 * change / before:+.1f} %)" if before else ""
    name, row = max(compared["breakdown"].items(), key=lambda item: abs(item[1]["change"]))
    most = f", most of it {WORDS.get(name, name).partition(' (')[0]}" if row["change"] * change > 0 else ""
    how = "grows" if change > 0 else "shrinks"
    return f"Device memory {how} by {format_bytes(abs(change))}{share}, to {format_bytes(after)}{most}."


def _tone(fits: str | None) -> str:
    """The colour of the verdict on the second report; none without a card."""
    return "" if fits is None else "no" if fits.startswith(("no", "likely not")) else "yes"


def _changed(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _read(name: str) -> dict[str, Any]:
    """The report in the file. Raises :class:`SourceError`."""
    try:
        document = read_json(Path(name))
    except (OSError, ValueError) as error:
        refuse_address(name)
        raise SourceError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise SourceError(f"{name} is no report; write one with: graphmem analyze MODEL --format json -o {name}")
    try:
        figures = [document["peak"][f"{level}_bytes"] for level in LEVELS] + list(document["breakdown"].values())
        texts = [document[key] for key in _ABOUT]
        held = document.get("at_peak") or {"modules": {}, "lines": {}}
        figures += [*held["modules"].values(), *held["lines"].values()]
        if not all(fits(figure, int) for figure in figures) or not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise SourceError(f"{name} is a damaged report; write it again with graphmem analyze --format json") from None
    return document


def _card(*reports: dict[str, Any]) -> dict[str, str | int] | None:
    """The card of both reports, and the bytes that a process can have there; None where they are of none, or two.
    Raises :class:`SourceError` for one that no report has."""
    first, second = (report.get("fits") for report in reports)
    if first is None or second is None:
        return None
    try:
        rooms = [one["capacity_bytes"] - one["others_bytes"] for one in (first, second)]
        if first["gpu"] != second["gpu"] or rooms[0] != rooms[1]:
            return None
        return {"gpu": str(first["gpu"]), "bytes": int(rooms[0])}
    except (KeyError, TypeError, ValueError):
        raise SourceError("one of the reports is damaged; write it again with graphmem analyze --format json") from None


def _fits(report: dict[str, Any]) -> str | None:
    """``yes``, ``no`` or ``likely, 97 %``, as the report's own verdict; None without a card. Raises
    :class:`SourceError` for one that no report has."""
    fit = report.get("fits")
    if fit is None:
        return None
    try:
        if any(one["code"] == "step_fails" for one in report.get("diagnostics", ())):
            return "no, the step fails on any card"
        verdict, chance = fit["verdict"], fit["probability"]
        if verdict not in ("yes", "no", "likely", "likely not") or not (chance is None or 0 <= chance <= 1):
            raise TypeError
        chance_words = Fit("", 0, 0, 0, verdict in ("yes", "likely"), probability=chance, margin=fit["margin"]).chance
    except (KeyError, TypeError):
        raise SourceError("a report's verdict is damaged; write it again with graphmem analyze --format json") from None
    return f"{verdict}, {chance_words}" if chance_words else verdict


def _ended_early(report: dict[str, Any]) -> bool:
    """Whether the figures are the least, as the run had not come to its end."""
    found = report.get("diagnostics", ())
    return isinstance(found, list) and any(isinstance(one, dict) and one.get("code") in _CUT_SHORT for one in found)


def _change(first: dict[str, int], second: dict[str, int], key: str) -> dict[str, int]:
    before, after = first.get(key, 0), second.get(key, 0)
    return {"before": before, "after": after, "change": after - before}
