"""Whether what a project watches stays within its budgets, its cards, and the figures that were committed.

    watches = [Watch("train", "train.py:build", {"batch": 8, "device": "A10G"}, budget_bytes=20 << 30)]
    checked = check(watches, locked={"train": 18_000_000_000}, growth=0.02)
    checked.passes

The figures that one commits (the lock file) are device bytes by the name of the watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphmem.answering.runs import RunCache, labelled, silent
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.request import Request
from graphmem.reports import Answer
from graphmem.reports.document import Column, Document, Items, Section, Table, Text, Value, section
from graphmem.reports.estimate import verdict
from graphmem.units import format_bytes


@dataclass(frozen=True)
class Watch:
    """A model that is watched. ``settings``: those that :meth:`Request.changed` takes; ``budget_bytes``: the most
    device memory that it may need, None for no budget of its own."""

    name: str
    model: object
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Row:
    """A watch with its estimate, or the ``error`` of one line that there was instead. ``locked_bytes``: the committed
    figure; ``trouble``: why the check fails, empty where it passes."""

    watch: Watch
    estimate: Estimate | None
    locked_bytes: int | None
    error: str
    trouble: tuple[str, ...]

    @property
    def change_bytes(self) -> int | None:
        """Device bytes more than committed; None without a figure."""
        if self.estimate is None or self.locked_bytes is None:
            return None
        return self.estimate.device - self.locked_bytes


@dataclass(frozen=True)
class Checked(Answer):
    """The watches in their order."""

    rows: tuple[Row, ...]

    @property
    def passes(self) -> bool:
        """Whether every watch does."""
        return not any(row.trouble for row in self.rows)

    @property
    def lock(self) -> dict[str, int]:
        """The figures to commit: device bytes by name, of the watches that were answered."""
        return {row.watch.name: row.estimate.device for row in self.rows if row.estimate is not None}

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem check``: one table, and why it fails."""
        return Document("check", "GPU memory that is watched", list(self._sections()), self.to_dict)

    def _sections(self) -> Iterator[Section]:
        failed = [row for row in self.rows if row.trouble]
        words = f"{len(self.rows) - len(failed)} of {len(self.rows)} watches pass."
        yield section("", Text((words,), "no" if failed else "yes"))
        columns = (
            Column("watch"), Column("card"), Column("device", "bytes"), Column("budget", "bytes"),
            Column("committed", "bytes"), Column("change", "change"), Column("verdict"), Column("result"),
        )  # fmt: skip
        yield section("", Table(columns, [_cells(row) for row in self.rows]))
        if failed:
            lines = [f"{row.watch.name}: {why}" for row in failed for why in row.trouble]
            yield section("Why it fails", Items(lines))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.check/1``; memory in bytes)."""
        return {
            "schema": "graphmem.check/1",
            "passes": self.passes,
            "rows": [
                {
                    "name": row.watch.name,
                    "estimate": None if row.estimate is None else row.estimate.to_dict(),
                    "error": row.error or None,
                    "budget_bytes": row.watch.budget_bytes,
                    "locked_bytes": row.locked_bytes,
                    "change_bytes": row.change_bytes,
                    "trouble": list(row.trouble),
                }
                for row in self.rows
            ],
        }


def check(
    watches: Sequence[Watch],
    *,
    locked: Mapping[str, int] | None = None,
    growth: float | int = 0.0,
    say: Callable[[str], None] = silent,
) -> Checked:
    """Analyse every watch, and judge it: within its budget, on its card (where the settings name one), and no more than
    ``growth`` (bytes, or as a float a share) above the committed figure of its name in ``locked`` (device bytes). A
    watch that cannot be analysed, or whose step would fail on any card, fails. Raises :class:`UsageError` for no
    watches, or two of one name."""
    names = [watch.name for watch in watches]
    if not names:
        raise UsageError("nothing is watched")
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"two watches are called {double!r}")
    cache = RunCache()
    return Checked(tuple(_row(one, (locked or {}).get(one.name), growth, cache, say) for one in watches))


def _row(watch: Watch, locked: int | None, growth: float | int, cache: RunCache, say: Callable[[str], None]) -> Row:
    try:
        estimate = Request(watch.model).changed(**watch.settings).run(cache, labelled(say, watch.name))
    except GraphmemError as error:
        return Row(watch, None, locked, str(error), (str(error),))
    return Row(watch, estimate, locked, "", tuple(_trouble(watch, estimate, locked, growth)))


def _trouble(watch: Watch, estimate: Estimate, locked: int | None, growth: float | int) -> Iterator[str]:
    needs = f"needs {format_bytes(estimate.device)} of device memory"
    yield from filter(None, [estimate.failure])
    if "device" in watch.settings and estimate.fit is not None and not estimate.fit.passes:
        yield verdict(estimate)[0].rstrip(".")
    if watch.budget_bytes is not None and estimate.device > watch.budget_bytes:
        over = format_bytes(estimate.device - watch.budget_bytes)
        yield f"{needs}, {over} over its budget of {format_bytes(watch.budget_bytes)}"
    allowed = growth if isinstance(growth, int) else growth * (locked or 0)
    if locked is not None and estimate.device > locked + allowed:
        more = f"{100 * (estimate.device / locked - 1):.1f} % more than the committed {format_bytes(locked)}"
        yield f"{needs}, {more} (--update commits the new figure)"


def _cells(row: Row) -> tuple[Value, ...]:
    estimate = row.estimate
    known = (row.watch.budget_bytes, row.locked_bytes, row.change_bytes)
    result = "fails" if row.trouble else "passes"
    if estimate is None:
        return (row.watch.name, "", None, *known, "", result)
    card = estimate.gpu if "device" in row.watch.settings else ""
    verdict = estimate.fit.verdict if estimate.fit is not None and card else ""
    return (row.watch.name, card, estimate.device, *known, verdict, result)
