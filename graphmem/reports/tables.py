"""An estimate as tables for other programs: its storages, operators, modules and phases, a row each.

A table is columns by name, each a list of plain values; all figures are bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from graphmem.errors import TraceError, UsageError
from graphmem.reports.tree import COLUMNS, owner, paths, read

if TYPE_CHECKING:
    from graphmem.estimate import Estimate
    from graphmem.trace import Trace

#: Columns by name.
Columns = Mapping[str, Sequence[Any]]

#: Libraries of data frames, the first that is installed first.
_LIBRARIES = ("pandas", "polars")


def columns(estimate: Estimate, name: str) -> Columns:
    """The table of this name. Raises :class:`UsageError` for a name that is none of :data:`TABLES`, and
    :class:`TraceError` where the events of the run were not kept."""
    if name not in TABLES:
        raise UsageError(f"unknown table {name!r}; accepted: {', '.join(TABLES)}")
    return TABLES[name](estimate)


def frame(estimate: Estimate, name: str, library: str | None = None) -> Any:
    """The table as a ``DataFrame`` of pandas or polars. Raises :class:`UsageError` where neither is installed."""
    if library not in (None, *_LIBRARIES):
        raise UsageError(f"unknown library {library!r}; accepted: {', '.join(_LIBRARIES)}")
    there = [one for one in _LIBRARIES if library in (None, one) and find_spec(one)]
    if not there:
        wanted = library or " or ".join(_LIBRARIES)
        raise UsageError(f"a data frame needs {wanted}, which is not installed: pip install {library or _LIBRARIES[0]}")
    return importlib.import_module(there[0]).DataFrame(dict(columns(estimate, name)))


def _storages(estimate: Estimate) -> Columns:
    """Every storage of the run, on the card and elsewhere. ``born`` and ``died`` are events, ``died`` None of one that
    lives at the end."""
    trace = _trace(estimate)
    makers, peak = trace.births(), set(trace.live_at(estimate.moment.event))
    born, died = _events(trace, 0), _events(trace, 1)
    rows = []
    for index, operator in makers.items():
        storage, made = trace.storages[index], trace.operators[operator]
        rows.append({
            "storage": index, "bytes": storage.bytes, "category": storage.category.name.lower(),
            "label": storage.label, "place": storage.place.name.lower(), "stream": storage.stream,
            "pool": storage.pool, "operator": made.name, "module": owner(storage, made), "source": made.source,
            "phase": str(trace.phases[made.phase]), "born": born[index], "died": died.get(index),
            "at_peak": index in peak,
        })  # fmt: skip
    return _by_column(rows)


def _operators(estimate: Estimate) -> Columns:
    """Every call of an operator: what it asked for on the card, what of that lives at the peak, and the levels after
    its last event."""
    trace = _trace(estimate)
    peak = set(trace.live_at(estimate.moment.event))
    asked, held, last = [[0] * len(trace.operators) for _ in range(3)]
    for index, operator in trace.births().items():
        if trace.storages[index].place.name == "DEVICE":
            asked[operator] += trace.storages[index].bytes
            held[operator] += trace.storages[index].bytes if index in peak else 0
    for event, operator in enumerate(trace.event_operators.tolist()):
        last[operator] = event
    seen = sorted(set(trace.event_operators.tolist()))
    rows = [
        {
            "operator": trace.operators[index].name, "module": trace.operators[index].module,
            "phase": str(trace.phases[trace.operators[index].phase]), "source": trace.operators[index].source,
            "bytes": asked[index], "bytes_at_peak": held[index], **_levels(estimate, last[index]),
        }
        for index in seen
    ]  # fmt: skip
    return _by_column(rows)


def _levels(estimate: Estimate, event: int) -> dict[str, int]:
    levels = ("requested", "allocated", "reserved")
    assert estimate.timeline is not None
    return {f"{level}_bytes": int(getattr(estimate.timeline, f"{level}_bytes")[event]) for level in levels}


def _modules(estimate: Estimate) -> Columns:
    """Every module with what it holds at the peak, the modules in it included; the first row, without a name, is the
    whole model."""
    root, _ = read(_trace(estimate), estimate.moment.event)
    names = (*(name for name, _ in COLUMNS), "other")
    rows = [
        {"module": path, **dict(zip(names, node.bytes(), strict=True)), "bytes": sum(node.bytes())}
        for path, node in (("", root), *paths(root))
    ]
    return _by_column(rows)


def _phases(estimate: Estimate) -> Columns:
    """The levels' maxima in every phase."""
    return _by_column([{"iteration": p.iteration, "phase": p.name, **asdict(p.peak)} for p in estimate.phases])


#: Name of a table -> what makes it.
TABLES: Mapping[str, Callable[[Estimate], Columns]] = {
    "storages": _storages,
    "operators": _operators,
    "modules": _modules,
    "phases": _phases,
}


def _trace(estimate: Estimate) -> Trace:
    if estimate.trace is None or estimate.timeline is None:
        raise TraceError("this analysis keeps no trace")
    return estimate.trace


def _events(trace: Trace, kind: int) -> dict[int, int]:
    """Storage -> the event of this kind that is about it."""
    events = (trace.kinds == kind).nonzero()[0]
    return dict(zip(trace.subjects[events].tolist(), events.tolist(), strict=True))


def _by_column(rows: Sequence[Mapping[str, Any]]) -> Columns:
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
