"""Two traces of one run: of a loop that drops the model's output and its loss, and of one that holds them.

The run drops them. Where ``hold`` has them let go is noted, and the frees of storages that it keeps until then are
moved there; :mod:`graphmem.capture.loop.held_output` finds those, and explains why nothing else differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from graphmem.capture.record.storages import Storages
from graphmem.trace import EventKind, Trace, validate


@dataclass(frozen=True)
class _Held:
    """Storages that live until row ``until``, where ``operator`` runs, whose frees lie in the rows from ``since`` on
    and before ``end``. ``storages`` in the order in which they are let go; None for all that are freed there."""

    since: int
    end: int
    until: int
    operator: int
    storages: list[int] | None


class BothLoops:
    """Notes where a loop drops an object that another holds, and where that one lets go.

    ``covers_both``: both traces are known so far. Once it is not, only the one that the run follows is.
    """

    def __init__(self, storages: Storages) -> None:
        self.covers_both = True
        self.is_wrong = False  # what was dropped already was not what it was taken for
        self._storages = storages
        self._held: list[_Held] = []
        self._output: tuple[int, list[int]] | None = None  # dropped at this row, and not assigned again
        self._losses: list[tuple[int, int]] = []  # the same of losses: rows of their frees

    @property
    def _row(self) -> int:
        return len(self._storages.builder.rows)

    def give_up(self) -> None:
        """From now on the run follows the loop that was asked for, and gives the trace of no other."""
        self.covers_both = False

    @contextlib.contextmanager
    def output_dropped(self, keys: Iterable[int]) -> Iterator[None]:
        """The output is dropped in this context; it keeps the storages with these ``_cdata`` alive."""
        live = self._storages.live
        storages = [live[key].index for key in keys if key in live]
        since = self._row
        yield
        self._output = since, storages
        dropped = self._storages.builder.rows[since:]
        if any(row[0] != EventKind.FREE or row[1] not in storages for row in dropped):
            self.is_wrong = True

    @contextlib.contextmanager
    def loss_dropped(self) -> Iterator[None]:
        """The loss, and with it the graph, is dropped in this context."""
        since = self._row
        yield
        self._losses.append((since, self._row))
        if any(row[0] != EventKind.FREE for row in self._storages.builder.rows[since:]):
            self.is_wrong = True

    def output_assigned(self) -> None:
        """The variable of the output is assigned the next one: its former value is let go."""
        if self._output is not None:
            since, storages = self._output
            self._held.append(_Held(since, self._row, self._row, self._storages.operator, storages))
            self._output = None

    def loss_assigned(self) -> None:
        """The variable of the loss has the next one."""
        for since, end in self._losses:
            self._held.append(_Held(since, end, self._row, self._storages.operator, None))
        self._losses = []

    def of_holding_loop(self, trace: Trace) -> Trace | None:
        """The trace of the loop that holds, of the one that was recorded; None where it is not known."""
        if self.is_wrong or any(self._storages.outgrown.intersection(held.storages or ()) for held in self._held):
            return None
        rows = np.arange(len(trace.kinds))
        place, order = rows.astype(np.float64), np.zeros(len(rows), np.int64)
        operators = trace.event_operators.copy()
        of_loss = np.zeros(len(rows), bool)
        for held in self._held:
            if held.storages is None:
                of_loss[held.since : held.end] = True
        moved = 0
        for held in self._held:
            window = slice(held.since, held.end)
            frees = rows[window][trace.kinds[window] == EventKind.FREE]
            if held.storages is not None:
                frees = frees[~of_loss[frees]]
                rank = {storage: position for position, storage in enumerate(held.storages)}
                frees = sorted(
                    (row for row in frees.tolist() if int(trace.subjects[row]) in rank),
                    key=lambda row: rank[int(trace.subjects[row])],
                )
            for row in frees:
                moved += 1
                place[row], order[row], operators[row] = held.until - 0.5, moved, held.operator
        rows = np.lexsort((order, place))
        holding = replace(
            trace,
            kinds=trace.kinds[rows],
            subjects=trace.subjects[rows],
            event_operators=operators[rows],
            event_streams=trace.event_streams[rows],
        )
        validate(holding)
        return holding
