"""The document of the accuracy report: tables of errors, of how sure they are, and of every case.

The same contents give the same document. Titles below those of a kind of truth begin with its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from graphmem.accuracy.compare import Comparison
from graphmem.accuracy.coverage import Coverage
from graphmem.accuracy.published.case import PublishedComparison
from graphmem.accuracy.published.section import (
    EstimatorSummary,
    PublishedSection,
    PublishedSource,
    other_errors,
    published_reason,
)
from graphmem.accuracy.record import OK
from graphmem.accuracy.report import VERDICTS, Contents, Section, reason, section
from graphmem.accuracy.statistics import ErrorSummary
from graphmem.reports import document
from graphmem.reports.document import Document, Picture, Table, Text, Value, table

SCHEMA = "graphmem.accuracy/1"
_INTRODUCTION = (
    "Errors are (predicted - measured) / measured: positive says too much. Percentiles are of absolute errors. A "
    "failure is a run that reserved more than 1 % above its estimate."
)
_PUBLISHED = (
    "Peaks that others measured on real cards and published, predicted now from what was published of each run. "
    "Nothing was measured by us, and nothing is tuned to them. Runs are rebuilt with the source's own loop, as "
    "programs (models_zoo/published/programs; sources, dates and cards in cases.json beside them), and compared at the "
    "level that was measured. What is known to be missing: the context of most cards is an assumption; cuDNN's "
    "workspaces are estimates; an older PyTorch than 2.4 is predicted as 2.4; libraries are those installed, not those "
    "of the time, except where a program says so; "
)
_VERDICTS = (
    "Recorded whole programs, answered as graphmem run answers them, and both peaks that were recorded on the stub "
    "driver, by what is known of cuDNN's plans. Exact, interval and open (not bounded on one side at least) are claims "
    "about the reserved peak; met: the recorded peaks lie where they were said to lie. Likely: verdicts that are "
    "neither yes nor no. reports/verdicts.md has the same by kinds of programs and causes of doubt."
)
_SURE = "how sure they are said to be"
#: Of a card, or of a process.
_ON_DEVICE, _RESERVED = "on the device", "reserved"

Row = Sequence[Value]


def document_of(contents: Contents) -> Document:
    """The whole report."""
    sections = [document.section("", Text([f"{contents.about} {_INTRODUCTION}"]))]
    for source in contents.sources:
        sections += _of_records(section(source, contents.comparisons))
    if contents.runs is not None:
        sections += _of_published(contents.runs, contents.published)
    if contents.verdicts:
        columns = {name: "count" if place else "" for place, name in enumerate(VERDICTS)}
        rows = table(columns, contents.verdicts, titled=True)
        sections.append(document.section("Verdicts against truth", Text([_VERDICTS]), rows))
    return Document("accuracy", "How good the predictions are", sections, lambda: _data(contents))


def _data(contents: Contents) -> dict[str, object]:
    """Measured and predicted bytes of every case, as plain values."""
    runs = contents.runs.sources if contents.runs is not None else ()
    return {
        "schema": SCHEMA,
        "about": contents.about,
        "cases": [
            {
                "record": json.loads(one.record.to_line()),
                "predicted": None if one.predicted.peak is None else asdict(one.predicted.peak),
                "error": one.predicted.error or None,
            }
            for one in contents.comparisons
        ],
        "published": [
            {
                "source": one.case.source,
                "case": one.case.name,
                "level": one.case.level,
                "measured_bytes": one.case.measured_bytes,
                "predicted_bytes": one.peak_bytes,
                "estimates_bytes": dict(one.case.estimates),
            }
            for source in runs
            for one in source.comparisons
        ],
        "verdicts": [dict(zip(VERDICTS, row, strict=True)) for row in contents.verdicts],
    }


# --- records ----------------------------------------------------------------------------------------------------------


def _of_records(part: Section) -> Iterator[document.Section]:
    if not part.comparisons:
        yield document.section(part.title, Text([part.introduction]))
    else:
        lines = [f"Estimation failures at a cap of 1 %: {part.failures} of {len(part.comparisons)}."]
        if part.capped:
            failed = sum(one.record.status != OK for one in part.capped)
            lines.append(f"Re-run under that cap: {failed} of {len(part.capped)} failed.")
        errors = [one.error("reserved") for one in part.comparisons]
        pairs = [(one.measured_bytes("reserved"), one.predicted_bytes("reserved")) for one in part.comparisons]
        yield document.section(
            part.title,
            Text([part.introduction]),
            _summaries("level", [(group.name, group.summary) for group in part.levels]),
            Text(lines),
            *_plots(pairs, errors, _RESERVED, "reserved memory"),
        )
        for title, groups in part.groups:
            summaries = _summaries(title, [(group.name, group.summary) for group in groups])
            yield document.section(f"{part.title}: reserved memory by {title}", summaries)
        yield document.section(f"{part.title}: {_SURE}", _covered(part.covered))
        yield document.section(f"{part.title}: the largest errors", _largest(part.worst))
        yield document.section(f"{part.title}: every case", _every(part.comparisons))
    if part.replayed:
        title = f"{part.title}: the recorded allocations in graphmem's allocator"
        yield document.section(title, _replayed(part.replayed))
    if part.not_compared:
        rows = table({"case": "", "why": ""}, part.not_compared, titled=True)
        yield document.section(f"{part.title}: not compared", rows)


def _summaries(title: str, rows: Sequence[tuple[str, ErrorSummary]]) -> Table:
    names = ("median signed", "median", "p90", "p95", "largest", "under-estimated")
    columns = {title: "", "cases": "count", "equal to the byte": "count", **dict.fromkeys(names, "figure")}
    found: list[Row] = []
    for name, s in rows:
        shares = (s.median, s.p90, s.p95, s.largest, s.under_estimated)
        found.append((name, s.count, s.exact, _signed(s.median_signed), *map(_percent, shares)))
    return table(columns, found, titled=True)


def _covered(covered: Sequence[tuple[str, Sequence[Coverage]]]) -> Table:
    columns = {
        "level": "", "cause of doubt": "", "cases": "count", "with an interval": "count", "measured inside": "figure",
        "under-estimated by over 1 %": "figure",
    }  # fmt: skip
    rows: list[Row] = []
    for level, found in covered:
        for one in found:
            inside = f"{one.inside} ({100 * one.inside / one.bounded:.1f} %)" if one.bounded else one.inside
            rows.append((level, one.cause, one.count, one.bounded, inside, _percent(one.under_estimated)))
    return table(columns, rows, titled=True)


def _largest(comparisons: Sequence[Comparison]) -> Table:
    columns = {
        "case": "", "measured reserved": "bytes", "predicted": "bytes", "error": "figure", "allocated error": "figure",
        "what is known": "",
    }  # fmt: skip
    rows: list[Row] = []
    for one in comparisons:
        sizes = one.measured_bytes("reserved"), one.predicted_bytes("reserved")
        errors = _signed(one.error("reserved")), _signed(one.error("allocated"))
        rows.append((one.record.case.name, *sizes, *errors, reason(one)))
    return table(columns, rows, titled=True)


def _every(comparisons: Sequence[Comparison]) -> Table:
    levels = ("allocated", "reserved")
    columns = {"case": "", **{f"measured {at}": "bytes" for at in levels}, **{f"{at} error": "figure" for at in levels}}
    rows: list[Row] = [
        (one.record.case.name, *map(one.measured_bytes, levels), *(_signed(one.error(at)) for at in levels))
        for one in comparisons
    ]
    return table(columns, rows, titled=True)


def _replayed(comparisons: Sequence[Comparison]) -> Table:
    titles = ("recorded peak in use", "the same replayed", "recorded peak of the pool", "the pool replayed")
    rows = []
    for one in comparisons:
        assert one.predicted.replayed is not None
        in_use, pool = one.predicted.replayed
        sizes = one.measured_bytes("allocated"), in_use, one.measured_bytes("reserved"), pool
        rows.append((one.record.case.name, *(f"{size} B" for size in sizes)))
    return table({"case": "", **dict.fromkeys(titles, "figure")}, rows, titled=True)


# --- published figures ------------------------------------------------------------------------------------------------


def _of_published(runs: PublishedSection, cited: Any) -> Iterator[document.Section]:
    rows = [(level.name, one) for level in runs.levels for one in level.estimators]
    title = "Published figures"
    estimators = _estimators(("level", "estimator"), [((at, one.name), one) for at, one in rows], shows_share=False)
    yield document.section(title, Text([f"{_PUBLISHED}{runs.chosen}."]), estimators)
    for source in runs.sources:
        yield _of_source(source)
    yield document.section(f"{title}: {_SURE}", _covered(runs.covered))
    if runs.skipped:
        skipped = [(source, count, why) for source, why, count in runs.skipped]
        rows_of_skipped = table({"source": "", "figures": "count", "why": ""}, skipped, titled=True)
        yield document.section(f"{title} that are not compared", rows_of_skipped)
    figures = dict.fromkeys(("year", "median error", "failures", "seconds a run"), "figure")
    columns = {"estimator": "", **figures, "evaluation": "", "source": ""}
    others = [
        (one["name"], one["year"], _percent(one["median"]), _percent(one["failure_rate"]),
         "-" if one["seconds"] is None else one["seconds"], one["scope"], one["source"])
        for one in cited["estimators"]
    ]  # fmt: skip
    words, cited_rows = Text([cited["comment"]]), table(columns, others, titled=True)
    yield document.section("What the authors of other estimators published of theirs", words, cited_rows)


def _of_source(source: PublishedSource) -> document.Section:
    columns = {
        "case": "", "level": "", "PyTorch": "figure", "measured": "bytes", "predicted": "bytes", "error": "figure",
        "other estimators' errors": "", "what is known": "",
    }  # fmt: skip
    estimators = _estimators(("estimator",), [((one.name,), one) for one in source.estimators], shows_share=True)
    pairs = [(one.case.measured_bytes, one.peak_bytes or 0) for one in source.comparisons]
    errors = [one.signed_error() for one in source.comparisons]
    plots = _plots(pairs, errors, _ON_DEVICE, "device memory")
    cases = table(columns, list(map(_published_row, source.comparisons)), titled=True)
    return document.section(source.name, estimators, *plots, cases)


def _published_row(one: PublishedComparison) -> Row:
    case = one.case
    sizes = case.measured_bytes, one.peak_bytes, _signed(one.signed_error())
    return (case.name, case.level_name, case.torch_version, *sizes, other_errors(one), published_reason(one))


def _estimators(
    titles: Sequence[str], rows: Sequence[tuple[tuple[str, ...], EstimatorSummary]], *, shows_share: bool
) -> Table:
    """A row an estimator, under its names; ``shows_share``: also the share of runs with too low an estimate."""
    names = ["median signed", "median", "p90", "largest"]
    names += ["under-estimated", "failures at 1 %"] if shows_share else ["under-estimated by more than 1 %"]
    columns = {**dict.fromkeys(titles, ""), "cases": "count", **dict.fromkeys(names, "figure")}
    found: list[Row] = []
    for named, one in rows:
        s = one.summary
        shares = [s.median, s.p90, s.largest, *([s.under_estimated] if shows_share else []), one.failures / s.count]
        found.append((*named, s.count, _signed(s.median_signed), *map(_percent, shares)))
    return table(columns, found, titled=True)


# --- words and plots --------------------------------------------------------------------------------------------------


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.3f} %"


def _plots(
    pairs: Sequence[tuple[int, int]], errors: Sequence[float], level: str, error_title: str
) -> tuple[Picture, Picture]:
    """Measured against predicted, and the errors in order; drawn by matplotlib where a format shows them."""

    def drawn(name: str, *arguments: object) -> Callable[[], str]:
        def draw() -> str:
            from graphmem.accuracy import plots

            svg: str = getattr(plots, name)(*arguments)
            return svg

        return draw

    scatter = Picture(f"predicted against measured {level}", drawn("scatter_plot", pairs, level))
    return scatter, Picture(f"errors of {error_title}", drawn("error_plot", errors, error_title))
