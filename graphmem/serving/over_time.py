"""A load over time on one engine: how full the KV cache gets, who waits, when preemption starts.

The work of a step, and its blocks, are the engine's scheduler's. The duration of a step is that of :class:`Speed`: as
the user gives it, else by the roofline, else assumed and named so. What a connector brings or sends takes its time on a
link, one request after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphmem.answering.runs import Progress, silent
from graphmem.errors import UsageError
from graphmem.serving.base import Batch, Request, Scheduler
from graphmem.serving.roofline import Roofline

#: Points of a timeline.
_POINTS = 240
#: Steps that a load may take.
_MOST_STEPS = 50_000_000
#: Turns of the loop between two reports of a load's progress.
_PROGRESS_EVERY = 2000
#: Tokens of the prompt by whose reading a predicted speed is shown.
_PROMPT = 2048
#: The part of requests that may not wait too long.
MOST_PART = 0.99


@dataclass(frozen=True)
class Speed:
    """The duration of a step: ``step_seconds`` (the weights are read), or longer where its tokens at
    ``tokens_per_second`` take longer. ``assumed`` where neither was given. With a ``roofline`` it is that of the
    scheduler's batch, at ``part`` of the expected speed, and the two figures are its own of a token and of a prompt."""

    step_seconds: float = 0.03
    tokens_per_second: float = 10_000.0
    assumed: bool = True
    roofline: Roofline | None = None
    part: float = 1.0

    def of(self, tokens: int, rows: int, context: float, pairs: float) -> float:
        """Seconds of a step (:meth:`Roofline.seconds`)."""
        if self.roofline is not None:
            return self.roofline.seconds(tokens, rows, context, pairs) / self.part
        return max(self.step_seconds, tokens / self.tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "step_seconds": self.step_seconds, "tokens_per_second": self.tokens_per_second, "assumed": self.assumed,
            "predicted": self.roofline is not None,
        }  # fmt: skip


def predicted(line: Roofline) -> Speed:
    """The speed by a roofline."""
    return Speed(line.answering(1, 0), _PROMPT / line.reading(1, _PROMPT), assumed=False, roofline=line)


@dataclass(frozen=True)
class Point:
    """A part of the time. ``used`` is the most of the cache that was held, from 0 to 1; ``running`` and ``waiting`` are
    the most requests at once, ``preemptions`` those of this part."""

    seconds: float
    used: float
    running: int
    waiting: int
    preemptions: int


@dataclass(frozen=True)
class LoadAnswer:
    """The course of a load on one copy of an engine. Times are seconds from its start, by :class:`Speed`.

    ``given_up_at``: when so many had waited too long that this copy cannot be enough, and it was followed no further;
    everything else is of the time until then. ``refused``: requests that the engine could never run.
    ``first_preemption`` is None without any. ``wait_p50`` and ``wait_p99`` are from arrival to the first step of a
    request, ``ttft_p50`` and ``ttft_p99`` to its first token; those that still wait at the end count as so long.
    ``tpot_p50`` and ``tpot_p99``: seconds a token behind the first, of finished requests. ``asked_tokens``: of requests
    that began; ``found_tokens`` of them were in the prefix cache, ``loaded_tokens`` more came from the host.
    """

    requests: int
    finished: int
    refused: int
    left_waiting: int
    seconds: float
    steps: int
    tokens_computed: int
    tokens_computed_again: int
    mean_used: float
    most_used: float
    most_running: int
    most_waiting: int
    preemptions: int
    preempted_requests: int
    first_preemption: float | None
    wait_p50: float
    wait_p99: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    asked_tokens: int
    found_tokens: int
    loaded_tokens: int
    timeline: tuple[Point, ...]
    given_up_at: float | None = None

    @property
    def refuses_many(self) -> bool:
        """Whether more requests are refused than may wait too long, which no number of copies mends."""
        return self.refused > (1 - MOST_PART) * self.requests


class Course:
    """The load on one engine, from 0 to ``seconds``. Requests are in the order of their arrival. ``bears``: it is given
    up once the 99th percentile of waiting will be more than so many seconds; None: it is followed to the end.
    ``token_seconds``: of a token's keys and values on the way to or from the card; ``since``: when requests were asked
    for, where that was before they arrived here. ``first_token``: when requests had theirs, by their number."""

    def __init__(
        self, scheduler: Scheduler, requests: Sequence[Request], seconds: float, speed: Speed,
        bears: float | None = None, token_seconds: float = 0.0, since: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self._scheduler, self._requests, self._seconds, self._speed = scheduler, requests, seconds, speed
        self._bears, self._token_seconds = bears, token_seconds
        self._arrivals = [request.arrival for request in requests]
        self._since = since or self._arrivals
        # What waits longest is at this place from the end, of all that arrive: so many may not wait too long.
        self._may_be_late = len(requests) - int(MOST_PART * len(requests)) - 1
        self._late = 0
        self._given_up_at: float | None = None
        self._now = self._free_at = self._taken = 0.0
        self._next = 0
        self._last: Batch | None = None
        self._pending: deque[tuple[Batch, float]] = deque()
        self._moved: deque[tuple[float, int]] = deque()  #: (when it arrives, whose keys and values)
        self._first_step: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self._paces: list[float] = []
        self._refused: set[int] = set()
        self._preempted: dict[int, int] = {}
        self._first_preemption: float | None = None
        self._steps = self._tokens = self._finished = 0
        self._area = 0.0
        self._points: list[list[float]] = [[0.0, 0, 0, 0] for _ in range(_POINTS)]

    def follow(self, say: Progress = silent) -> None:
        """Batches are asked for and come back; as many are under way as the engine has (``batches_in_flight``)."""
        scheduler, turns = self._scheduler, 0
        while self._now < self._seconds:
            if turns % _PROGRESS_EVERY == 0:
                say(f"{self._now / self._seconds:.0%} of the time")
            turns += 1
            self._arrive()
            if self._late > self._may_be_late:
                self._given_up_at = self._now
                return
            if self._steps >= _MOST_STEPS:
                raise UsageError(f"the load takes more than {_MOST_STEPS:,} steps; give a shorter --duration")
            self._move()
            self._repeat()
            batch = scheduler.schedule()
            self._move()
            self._note(batch)
            if batch.entries:
                self._last = batch
                self._taken = self._speed.of(batch.total, len(batch.entries), batch.context, batch.pairs)
                self._free_at = max(self._free_at, self._now) + self._taken
                self._pending.append((batch, self._free_at))
                if len(self._pending) < scheduler.batches_in_flight:
                    continue
            else:
                scheduler.update(batch)
            if self._pending:
                oldest, at = self._pending.popleft()
                self._advance(max(at, self._now))
                self._came_back(oldest, scheduler.update(oldest))
            elif not batch.preempted:  # whoever made room may go on at once
                self._advance(max(self._now, self._next_event()))

    def answer(self) -> LoadAnswer:
        """The course as far as it was followed."""
        until = self._seconds if self._given_up_at is None else self._given_up_at
        scheduler, points = self._scheduler, self._points
        arrived = range(len(self._requests) if self._given_up_at is None else self._next)
        taken = [number for number in arrived if number not in self._refused]
        waits = sorted(self._first_step.get(number, until) - self._arrivals[number] for number in taken)
        ttfts = sorted(self.first_token.get(number, until) - self._since[number] for number in taken)
        paces = sorted(self._paces)
        return LoadAnswer(
            requests=len(self._requests),
            finished=self._finished,
            refused=len(self._refused),
            left_waiting=sum(number not in self._first_step for number in taken),
            seconds=self._seconds,
            steps=self._steps,
            tokens_computed=self._tokens,
            tokens_computed_again=scheduler.lost_tokens,
            mean_used=self._area / until,
            most_used=max(point[0] for point in points),
            most_running=int(max(point[1] for point in points)),
            most_waiting=int(max(point[2] for point in points)),
            preemptions=sum(self._preempted.values()),
            preempted_requests=len(self._preempted),
            first_preemption=self._first_preemption,
            wait_p50=quantile(waits, 0.5),
            wait_p99=quantile(waits, MOST_PART),
            ttft_p50=quantile(ttfts, 0.5),
            ttft_p99=quantile(ttfts, MOST_PART),
            tpot_p50=quantile(paces, 0.5),
            tpot_p99=quantile(paces, MOST_PART),
            asked_tokens=scheduler.asked_tokens,
            found_tokens=scheduler.found_tokens,
            loaded_tokens=scheduler.loaded_tokens,
            timeline=tuple(
                Point(self._seconds * index / _POINTS, used, int(running), int(waiting), int(preemptions))
                for index, (used, running, waiting, preemptions) in enumerate(points)
            ),
            given_up_at=self._given_up_at,
        )

    def _arrive(self) -> None:
        """Requests, and keys and values, whose time has come."""
        while self._next < len(self._arrivals) and self._arrivals[self._next] <= self._now:
            request = self._requests[self._next]
            if self._scheduler.fits(request):
                self._scheduler.add(self._next, request)
            else:
                self._refused.add(self._next)
            self._next += 1
        while self._moved and self._moved[0][0] <= self._now:
            self._scheduler.transferred(self._moved.popleft()[1])

    def _move(self) -> None:
        """What has begun to be brought or sent takes the link behind what is on it."""
        for number, tokens in self._scheduler.transfers():
            begins = max(self._now, self._moved[-1][0] if self._moved else 0.0)
            self._moved.append((begins + tokens * self._token_seconds, number))

    def _next_event(self) -> float:
        """When the next request, or its keys and values, arrive; else the end."""
        arrival = self._arrivals[self._next] if self._next < len(self._arrivals) else self._seconds
        return min(arrival, self._moved[0][0] if self._moved else self._seconds, self._seconds)

    def _repeat(self) -> None:
        """As many steps as are like the last one, each with one token more of every request, up to the next event."""
        scheduler = self._scheduler
        last, rows = self._last, scheduler.running
        until = self._next_event()
        if last is None or len(self._pending) != scheduler.batches_in_flight - 1 or until < self._free_at + self._taken:
            return
        most = scheduler.alike(last)
        if not most:
            return
        before, now = self._used(), self._now
        ends = deque(end for _, end in self._pending)
        steps, context = 0, last.context
        while steps < most and now < until:
            context += rows
            steps += 1
            self._free_at = max(self._free_at, now) + self._speed.of(rows, rows, context, context)
            ends.append(self._free_at)
            now = ends.popleft()
        scheduler.repeat(steps)
        last.context = context
        self._pending = deque(zip((batch for batch, _ in self._pending), ends, strict=True))
        self._steps += steps
        self._tokens += steps * rows
        self._advance(now, (before + self._used()) / 2)
        self._mark(self._points[self._place()])
        self._arrive()

    def _advance(self, to: float, used: float | None = None) -> None:
        to = min(to, self._seconds)
        self._area += (self._used() if used is None else used) * (to - self._now)
        first = self._place()
        self._now = to
        for point in self._points[first + 1 : self._place() + 1]:  # parts of the time without a step of their own
            self._mark(point)

    def _used(self) -> float:
        return self._scheduler.used_blocks / max(1, self._scheduler.blocks)

    def _place(self) -> int:
        return min(_POINTS - 1, int(self._now / self._seconds * _POINTS))

    def _mark(self, point: list[float]) -> None:
        point[0] = max(point[0], self._used())
        point[1] = max(point[1], self._scheduler.running)
        point[2] = max(point[2], self._scheduler.waiting)

    def _note(self, batch: Batch) -> None:
        """Note the figures of a step once it is scheduled."""
        point = self._points[self._place()]
        self._mark(point)
        if batch.preempted:
            point[3] += len(batch.preempted)
            if self._first_preemption is None:
                self._first_preemption = self._now
            for number in batch.preempted:
                self._preempted[number] = self._preempted.get(number, 0) + 1
        if batch.entries:
            self._steps += 1
            self._tokens += batch.total
        for number in batch.admitted:
            if number not in self._first_step:
                self._first_step[number] = self._now
                self._late += self._bears is not None and self._now - self._arrivals[number] > self._bears

    def _came_back(self, batch: Batch, finished: Iterable[int]) -> None:
        for number in batch.begun:
            self.first_token[number] = self._now
        for number in finished:
            self._finished += 1
            if (more := self._requests[number].output - 1) > 0:
                self._paces.append((self._now - self.first_token[number]) / more)


def quantile(values: Sequence[float], part: float) -> float:
    """Of values that rise, 0 of none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
