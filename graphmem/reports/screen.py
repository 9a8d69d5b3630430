"""The first screen of an estimate: 80 columns and, with the next prompt, 24 lines that answer what people ask first.

The verdict and how sure it is, what the memory is made of against the card's edge, when the peak happens, what to
change first, and where the rest is: the whole report of :mod:`graphmem.reports.estimate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graphmem.reports import flight
from graphmem.reports import tree as modules
from graphmem.reports.document import Curve, Curves, Document, Section, Shares, Text, section, shortened
from graphmem.reports.estimate import (
    about,
    budget_lines,
    decided,
    edge,
    events,
    head_lines,
    parts,
    remedy,
    runs,
    verdict,
    where,
)
from graphmem.units import format_alike, format_bytes

if TYPE_CHECKING:
    from graphmem.estimate import Estimate

#: Lines of a terminal as it opens, of which the next prompt has one.
HEIGHT = 23
#: Columns of the longest sentence about a place, two lines; and places that decide which are named.
_LONGEST, _PLACES = 156, 2
#: Columns of the name of a part.
_NAME = 34


def document(estimate: Estimate, budget_bytes: int | None = None, tree: bool = False) -> Document:
    """One screen, and with ``tree`` the modules below it. What comes first is whether the device memory is within
    ``budget_bytes``."""
    sections = [*_sections(estimate, budget_bytes), *([modules.section_of(estimate)] if tree else [])]
    title = f"GPU memory of {estimate.model}"
    height = None if tree else HEIGHT
    return Document("estimate", title, sections, estimate.to_dict, about=about(estimate), height=height)


def _sections(estimate: Estimate, budget_bytes: int | None) -> Iterator[Section]:
    assumed = " (assumed: no --gpu)" if estimate.card_assumed else ""
    on = f" on {estimate.gpu}{assumed}" if estimate.gpu else ""
    what = Text([shortened(f"{estimate.model}{on}: {estimate.step}; {estimate.runtime}", _LONGEST)])
    over = budget_bytes is not None and estimate.device > budget_bytes
    lines = [*budget_lines(estimate, budget_bytes), *head_lines(estimate), *_places(estimate)]
    yield section("", what, Text(lines, "yes" if runs(estimate) and not over else "no"))
    yield section("", _parts(estimate), Text([_levels(estimate)]))
    yield section("", Text([shortened(f"Peak in {where(estimate.moment)}", _LONGEST)]), *_curve(estimate))
    yield section("", Text([*remedy(estimate), *_beside(estimate), _rest(estimate)]))
    yield from events(estimate)  # a notebook draws them


def picture(estimate: Estimate) -> Document:
    """The verdict and the run over its events."""
    said = Text(list(verdict(estimate))[:1], "yes" if runs(estimate) else "no")
    sections = [section("", said), *events(estimate)]
    return Document("estimate", f"GPU memory of {estimate.model}", sections, estimate.to_dict, about=about(estimate))


def _places(estimate: Estimate) -> Iterator[str]:
    """The first places where data decides sizes or branches: the figures depend on what was assumed there."""
    found = [shortened(message, _LONGEST) for message in decided(estimate)]
    yield from (f"Assumed: {one}" for one in found[:_PLACES])
    if len(found) > _PLACES:
        yield f"Assumed: {len(found) - _PLACES} more such lines (--details)"


def _parts(estimate: Estimate) -> Shares:
    """The parts of the peak, the largest that there is room for, against the edge of the card."""
    short = [(shortened(name.partition(" (")[0], _NAME), size, note) for name, size, note in parts(estimate)]
    return Shares(short, ("together", sum(estimate.breakdown.values())), edge(estimate), as_bars=True)


def _levels(estimate: Estimate) -> str:
    """The peaks of the levels, each with its interval."""
    names = [name for name, _ in estimate.levels]
    sizes = format_alike(*(getattr(estimate, name) for name in names))
    levels = [f"{name} {size}" for name, size in zip(names, sizes, strict=True)]
    recorded = estimate.details.get("recorded") or {}
    told = [f"{name} {format_bytes(size)}" for name in names if (size := recorded.get(f"{name}_bytes"))]
    return f"Peaks: {', '.join(levels)}" + (f"; recorded: {', '.join(told)}" if told else "")


def _curve(estimate: Estimate) -> Sequence[Curves]:
    """The allocated bytes over the run, where its events are kept."""
    timeline = estimate.timeline
    if timeline is None or not len(timeline.allocated_bytes):
        return ()
    values = timeline.allocated_bytes
    highest = max(1, int(values.max()))
    return [Curves([Curve("", values / highest)], "", "", "share", caption="allocated, over time", brief=True)]


def _beside(estimate: Estimate) -> Iterator[str]:
    """What a program did besides: runs, processes, files."""
    details = estimate.details
    if "runs" in details:
        yield f"The largest of {len(details['runs'])} runs of the program's loops (--details has each)."
    if "followed" in details and (count := len(details["followed"]["processes"])) > 1:
        yield f"The fullest of {count} processes that used the card."
    if "sandbox" in details and (words := flight.summary(details["sandbox"])):
        yield words


def _rest(estimate: Estimate) -> str:
    """How much the whole report says beside this, and how to see it."""
    counts = [f"{len(estimate.assumptions)} assumed"] if estimate.assumptions else []
    for kind in ("unknown", "warning", "note"):
        count = sum(one.kind == kind for one in estimate.diagnostics)
        plural = "s" if count > 1 and kind != "unknown" else ""
        counts += [f"{count} {kind}{plural}"] if count else []
    said = f" ({', '.join(counts)})" if counts else ""
    return f"All of it{said}: --details, --html FILE."
