"""What lives at each event of a run, as tables of plain values for a page that can be looked at at any moment.

A table is columns of equal length. Words stand once, in ``strings``, and columns have their places there. Columns named
in ``steps`` hold differences, each from the value before it: small numbers, which compress well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphmem.reports.tree import owner

if TYPE_CHECKING:
    import numpy.typing as npt

    from graphmem.allocators.base import SegmentView
    from graphmem.estimate import Estimate
    from graphmem.trace import Trace

_STEPS = ("operator", "allocated", "reserved", "born")


def tables(estimate: Estimate) -> Mapping[str, Any]:
    """The tables of an estimate that has its events: ``storages`` of the device in order of birth, with their ``lasts``
    in events (0: to the end), ``operators``, and ``events`` with the levels after each. ``segments``: the allocator's
    at the peak. ``edge``: the card's name and the bytes that segments can have there. ``categories`` stand in the order
    of the breakdown, by which they have their colours."""
    from graphmem.reports.estimate import WORDS, edge

    trace, timeline, words = estimate.trace, estimate.timeline, _Words()
    assert trace is not None
    assert timeline is not None
    end = edge(estimate)
    order = list(dict.fromkeys([*estimate.breakdown, *(one.category.name for one in trace.storages)]))
    return {
        "categories": [WORDS.get(name, name).partition(" (")[0] for name in order],
        "phases": [str(phase) for phase in trace.phases],
        "operators": _operators(trace, words),
        "storages": _storages(trace, order, words),
        "events": {
            "operator": _steps(trace.event_operators),
            "allocated": _steps(timeline.allocated_bytes),
            "reserved": _steps(timeline.reserved_bytes),
        },
        "segments": [] if estimate.find_segments is None else [_segment(one) for one in estimate.find_segments()],
        "steps": _STEPS,
        "strings": list(words),
        "peak": estimate.moment.event,
        "edge": None if end is None else (end[0], max(0, end[1] - (estimate.device - estimate.reserved))),
    }


def _segment(view: SegmentView) -> dict[str, Any]:
    """A segment with its blocks in the order of addresses: the bytes of each, negative where it is free."""
    blocks = [block.size if block.state != "free" else -block.size for block in view.blocks]
    return {"kind": view.kind, "stream": view.stream, "pool": view.pool, "blocks": blocks}


class _Words(dict[str, int]):
    """Words with their places in a list of them."""

    def __missing__(self, word: str) -> int:
        self[word] = len(self)
        return self[word]


def _operators(trace: Trace, words: _Words) -> dict[str, list[int]]:
    return {
        **{name: [words[getattr(one, name)] for one in trace.operators] for name in ("name", "module", "source")},
        "phase": [one.phase for one in trace.operators],
    }


def _storages(trace: Trace, order: list[str], words: _Words) -> dict[str, list[int]]:
    born, died, end = trace.birth_of.tolist(), trace.death_of.tolist(), len(trace)
    on_device = (at for at, one in enumerate(trace.storages) if one.place.name == "DEVICE" and born[at] < end)
    shown = sorted(on_device, key=lambda at: born[at])
    makers = trace.event_operators.tolist()
    rows = [(trace.storages[at], trace.operators[makers[born[at]]]) for at in shown]
    return {
        "bytes": [one.bytes for one, _ in rows],
        "category": [order.index(one.category.name) for one, _ in rows],
        "label": [words[one.label] for one, _ in rows],
        "module": [words[owner(one, maker)] for one, maker in rows],
        "born": _steps(born[at] for at in shown),
        "lasts": [died[at] - born[at] if died[at] < end else 0 for at in shown],
    }


def _steps(values: Iterable[int] | npt.NDArray[np.int64]) -> list[int]:
    """The values as differences, the first from 0."""
    found: list[int] = np.diff(np.fromiter(values, np.int64), prepend=0).tolist()
    return found
