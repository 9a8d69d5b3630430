"""The report's part on published figures: graphmem beside the estimators that published theirs on the same runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from graphmem.accuracy.compare import CAP_SLACK
from graphmem.accuracy.coverage import Coverage, coverage
from graphmem.accuracy.published.case import PublishedCase, PublishedComparison, Skipped
from graphmem.accuracy.statistics import ErrorSummary, summarize_errors
from graphmem.units import format_bytes

GRAPHMEM = "graphmem"
#: The same, where a cuDNN was given to be asked for the workspaces of convolutions.
ASKED = "graphmem, cuDNN asked"
#: Levels in the order of the report.
LEVELS = ("allocated", "reserved", "process", "whole card")


@dataclass(frozen=True)
class EstimatorSummary:
    """One estimator on the runs of one source. ``failures`` needed over 1 % more than their estimate."""

    name: str
    summary: ErrorSummary
    failures: int


@dataclass(frozen=True)
class PublishedSource:
    """The runs of one source that both sides have, and the estimators compared on them."""

    name: str
    comparisons: tuple[PublishedComparison, ...]
    estimators: tuple[EstimatorSummary, ...]


@dataclass(frozen=True)
class PublishedLevel:
    """The runs of all sources at one level, and the estimators on those of them that they were run on."""

    name: str
    estimators: tuple[EstimatorSummary, ...]


@dataclass(frozen=True)
class PublishedSection:
    """The report's part on published figures. ``skipped``: (source, reason, how many); ``chosen``:
    which of the rebuilt runs were predicted; ``covered``: by the level that was measured, how often it lay in the
    interval told of it."""

    levels: tuple[PublishedLevel, ...]
    sources: tuple[PublishedSource, ...]
    skipped: tuple[tuple[str, str, int], ...]
    chosen: str
    covered: tuple[tuple[str, tuple[Coverage, ...]], ...] = ()


def published_section(
    comparisons: Sequence[PublishedComparison], skipped: Sequence[Skipped], chosen: str
) -> PublishedSection:
    """Group by source; runs without a prediction count as skipped."""
    found = [item for item in comparisons if item.peak_bytes is not None]
    reasons = Counter([(item.source, item.why) for item in skipped])
    reasons.update(
        (item.case.source, f"no prediction: {item.error}") for item in comparisons if item.peak_bytes is None
    )
    names = dict.fromkeys(item.case.source for item in found)
    levels = [name for name in LEVELS if any(item.case.level_name == name for item in found)]
    return PublishedSection(
        levels=tuple(_level(name, [item for item in found if item.case.level_name == name]) for name in levels),
        sources=tuple(_source(name, [item for item in found if item.case.source == name]) for name in names),
        skipped=tuple((source, why, count) for (source, why), count in sorted(reasons.items())),
        chosen=chosen,
        covered=tuple(
            (level, coverage([item.judged() for item in found if item.case.level == level]))
            for level in ("allocated", "reserved", "device")
            if any(item.case.level == level for item in found)
        ),
    )


def _source(name: str, comparisons: Sequence[PublishedComparison]) -> PublishedSource:
    ordered = sorted(comparisons, key=lambda item: (-abs(item.signed_error()), item.case.name))
    return PublishedSource(name, tuple(ordered), _estimators(comparisons))


def _level(name: str, comparisons: Sequence[PublishedComparison]) -> PublishedLevel:
    """All runs of a level; beside each other estimator graphmem once more, on that one's runs alone."""
    estimators = list(_estimators(comparisons))
    for other in [item for item in estimators if item.name not in (GRAPHMEM, ASKED)]:
        same = [item for item in comparisons if other.name in dict(item.case.estimates)]
        mine = [(item.peak_bytes or 0, item.case.measured_bytes) for item in same]
        estimators.append(_estimator(f"{GRAPHMEM} on the runs of {other.name}", mine))
    return PublishedLevel(name, tuple(estimators))


def _estimators(comparisons: Sequence[PublishedComparison]) -> tuple[EstimatorSummary, ...]:
    pairs = {GRAPHMEM: [(item.peak_bytes or 0, item.case.measured_bytes) for item in comparisons]}
    for item in comparisons:
        if item.peak_bytes is not None and any(other.asked_bytes is not None for other in comparisons):
            asked = item.peak_bytes if item.asked_bytes is None else item.asked_bytes
            pairs.setdefault(ASKED, []).append((asked, item.case.measured_bytes))
        for estimator, estimate in item.case.estimates:
            pairs.setdefault(estimator, []).append((estimate, item.case.measured_bytes))
    return tuple(_estimator(*entry) for entry in pairs.items())


def _estimator(name: str, pairs: Sequence[tuple[int, int]]) -> EstimatorSummary:
    summary = summarize_errors([(estimate - measured) / measured for estimate, measured in pairs])
    return EstimatorSummary(name, summary, sum(measured > (1 + CAP_SLACK) * estimate for estimate, measured in pairs))


def other_errors(item: PublishedComparison) -> str:
    """The errors of the other estimators on this run."""
    measured = item.case.measured_bytes
    return ", ".join(f"{name} {100 * (bytes_ - measured) / measured:+.1f} %" for name, bytes_ in item.case.estimates)


def sample(cases: Sequence[PublishedCase], per_source: int) -> list[PublishedCase]:
    """At most so many runs of each source, evenly spaced in the order of the tables."""
    chosen: list[PublishedCase] = []
    for name in dict.fromkeys(case.source for case in cases):
        mine = [case for case in cases if case.source == name]
        number = min(per_source, len(mine))
        chosen += [mine[at * len(mine) // number] for at in range(number)]
    return chosen


def published_reason(item: PublishedComparison) -> str:
    """The known reasons why one prediction is uncertain."""
    words = []
    if item.case.level == "device" and not item.context_is_measured:
        words.append(f"context assumed, {format_bytes(item.context_bytes)}")
    if item.case.beyond_model:
        words.append("counted from a sample that saw the model on the card")
    if item.case.grown_bytes:
        words.append(
            f"with {format_bytes(item.case.grown_bytes)} of kernels and libraries loaded after the first sample"
        )
    if item.estimated_buffer_bytes:
        words.append(f"cuDNN workspaces are estimates, up to {format_bytes(item.estimated_buffer_bytes)}")
    if item.unknown:
        words.append(f"{item.unknown} times something not modelled")
    if item.is_limited:
        words.append("the card's end limits the cache")
    if not item.fits:
        words.append("predicted to run out of memory, which it did not")
    asked = item.asked_error()
    if asked is not None:
        words.append(f"{100 * asked:+.2f} % with cuDNN asked")
    if item.case.why:
        words.append(item.case.why)
    return "; ".join(words)
