"""A trace for https://ui.perfetto.dev: the levels as counters; phases, modules and operators as slices.

The format is JSON of trace events, which Chrome and Perfetto read. An estimate has no clock: a microsecond is an event.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

from graphmem.estimate import Estimate
from graphmem.exports import Asked, trace_of
from graphmem.trace import EventKind, Trace

Row = dict[str, Any]

_PROCESS = 1
#: The tracks of slices, from top to bottom.
_TRACKS = ("phases", "modules", "operators")


class Perfetto:
    name = "perfetto"
    suffixes = (".perfetto.json", ".perfetto-trace")
    is_binary = False

    def render(self, estimate: Estimate, asked: Asked) -> str:
        """One JSON object with ``traceEvents``."""
        return json.dumps({"traceEvents": list(_rows(estimate)), "displayTimeUnit": "ms"}) + "\n"


EXPORT = Perfetto()


def _rows(estimate: Estimate) -> Iterator[Row]:
    trace = trace_of(estimate)
    yield _named("process_name", f"{estimate.model} on {estimate.gpu}")
    for track, name in enumerate(_TRACKS, 1):
        yield {**_named("thread_name", name), "tid": track}
        yield {**_named("thread_sort_index", name), "tid": track, "args": {"sort_index": track}}
    yield from _slices(trace)
    yield from _counters(estimate)
    if estimate.moment.event >= 0:
        yield {"ph": "i", "s": "p", "name": "peak", "pid": _PROCESS, "tid": 1, "ts": estimate.moment.event}


def _named(what: str, name: str) -> Row:
    return {"ph": "M", "name": what, "pid": _PROCESS, "args": {"name": name}}


def _counters(estimate: Estimate) -> Iterator[Row]:
    """The levels, at every event that changes them."""
    for level in ("requested", "allocated", "reserved"):
        values = [] if estimate.timeline is None else getattr(estimate.timeline, f"{level}_bytes").tolist()
        for begin, _, value in _runs(values):
            yield {"ph": "C", "name": level, "pid": _PROCESS, "ts": begin, "args": {"bytes": value}}


def _slices(trace: Trace) -> Iterator[Row]:
    """What runs at each event. A module is a slice within that of the module around it."""
    at, made = trace.event_operators.tolist(), _made(trace)
    for begin, end, phase in _runs([trace.operators[index].phase for index in at]):
        yield _slice(1, begin, end, str(trace.phases[phase]))
    paths = [tuple(filter(None, trace.operators[index].module.split("."))) for index in at]
    for depth in range(1, max(map(len, paths), default=0) + 1):
        for begin, end, path in _runs([path[:depth] if len(path) >= depth else () for path in paths]):
            if path:
                yield _slice(2, begin, end, path[-1], module=".".join(path))
    for begin, end, index in _runs(at):
        one = trace.operators[index]
        facts = {"module": one.module, "source": one.source, "bytes": sum(made[begin:end]) or ""}
        yield _slice(3, begin, end, one.name, **{name: value for name, value in facts.items() if value})


def _made(trace: Trace) -> list[int]:
    """The bytes that each event asks for."""
    return [trace.storages[subject].bytes if kind == EventKind.ALLOC else 0 for kind, subject, _, _ in trace.rows()]


def _slice(track: int, begin: int, end: int, name: str, **facts: object) -> Row:
    row = {"ph": "X", "name": name, "pid": _PROCESS, "tid": track, "ts": begin, "dur": end - begin}
    return {**row, "args": facts} if facts else row


def _runs(values: Sequence[Hashable]) -> Iterator[tuple[int, int, Any]]:
    """(begin, end, value) of every stretch of equal values."""
    begin = 0
    for value, group in groupby(values):
        end = begin + sum(1 for _ in group)
        yield begin, end, value
        begin = end
