"""A load over time on one engine: how full the KV cache gets, who waits, when preemption starts, and how many copies of
the engine the load needs.

The work of a step, and its blocks, are the engine's scheduler's. The duration of a step is that of :class:`Speed`: as
the user gives it, else by the roofline, else assumed and named so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphmem.answering.runs import Progress, labelled, silent
from graphmem.base.searching import largest
from graphmem.errors import UsageError
from graphmem.serving.base import Batch, Request, Scheduler, Served
from graphmem.serving.roofline import SLOW, Roofline

#: Points of a timeline.
_POINTS = 240
#: Steps that a load may take, tokens of all its answers, and copies that are tried.
_MOST_STEPS, _MOST_ANSWERED, _MOST_COPIES = 5_000_000, 300_000_000, 1 << 10
#: Seconds of a load that one copy follows to its end, whatever comes of it; of a longer one, and on more copies, no
#: more than shows that too many wait too long.
_WHOLE = 3600.0
#: Steps between two reports of a load's progress.
_PROGRESS_EVERY = 2000
#: Tokens of the prompt by whose reading a predicted speed is shown.
_PROMPT = 2048
#: The part of requests that may not wait too long.
_MOST_PART = 0.99


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

    def of(self, batch: Batch) -> float:
        """Seconds of a step."""
        if self.roofline is not None:
            return self.roofline.of(batch) / self.part
        return max(self.step_seconds, batch.total / self.tokens_per_second)

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
    request; those that still wait at the end count as so long.
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
    timeline: tuple[Point, ...]
    given_up_at: float | None = None


@dataclass(frozen=True)
class Copies:
    """The same load dealt out in turn to so many copies: the requests of the first of them, until the end or for
    ``followed`` seconds, after which it could not be enough any more."""

    copies: int
    cards: int
    most_used: float
    preemptions: int
    wait_p99: float
    enough: bool
    followed: float | None = None


@dataclass(frozen=True)
class LoadReport:
    """A load on one copy, and the fewest copies that it needs: the 99th percentile of waiting is at most ``max_wait``
    seconds there. None where 1,024 are not enough. ``tried`` are all that were looked at. ``slow_copies``: the same at
    the slow end of a predicted speed. ``answered``: tokens of all answers, ``price``: dollars an hour of a copy."""

    described: str
    rules: str
    speed: Speed
    answer: LoadAnswer
    max_wait: float
    copies: int | None
    cards: int | None
    tried: tuple[Copies, ...]
    slow_copies: int | None = None
    answered: int = 0
    price: float | None = None

    @property
    def price_of_all(self) -> float | None:
        """Dollars an hour of all copies."""
        return None if self.price is None or self.copies is None else self.price * self.copies

    @property
    def answers_cost(self) -> float | None:
        """Dollars of a million tokens of answers, their prompts and idle cards included."""
        price = self.price_of_all
        return None if price is None else price * self.answer.seconds / 3600 / max(1, self.answered) * 1e6

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        costs = {"price_of_all": self.price_of_all, "answers_cost": self.answers_cost}
        return {**asdict(replace(self, speed=Speed())), "speed": self.speed.to_dict(), **costs}


def unscheduled(engine: str) -> str:
    """The refusal of a load on an engine whose scheduler is not followed."""
    return f"{engine}: its scheduler is not followed; --arrivals and --trace want --engine vllm"


def loaded(
    served: Served,
    requests: Sequence[Request],
    seconds: float,
    speed: Speed,
    max_wait: float,
    described: str,
    say: Progress = silent,
    price: float | None = None,
) -> LoadReport:
    """The load on an engine that starts. Raises :class:`UsageError` for an engine whose scheduler is not followed."""
    if served.scheduler is None:
        raise UsageError(unscheduled(served.engine))
    if served.refusal is not None:
        raise UsageError(f"the engine does not start, so nothing arrives: {served.refusal}")
    answered = sum(request.output for request in requests)
    if answered > _MOST_ANSWERED:
        raise UsageError(
            f"the load's answers have {answered:,} tokens; at most {_MOST_ANSWERED:,} are followed: give a shorter "
            "--duration or --trace"
        )
    make = served.scheduler
    answers: dict[int, LoadAnswer] = {}

    def enough(copies: int) -> bool:
        heard = labelled(say, f"the load on {copies:,} like this")
        bears = None if copies == 1 and seconds <= _WHOLE else max_wait
        answers[copies] = simulate(make(), requests[::copies], seconds, speed, bears, heard)
        return _enough(answers[copies], max_wait)

    def is_too_few(more: int) -> bool:  # at the slow end, from one less than are enough on
        copies = too_few + more
        heard = labelled(say, f"the load on {copies:,} slow ones")
        slow = replace(speed, part=SLOW)
        return not _enough(simulate(make(), requests[::copies], seconds, slow, max_wait, heard), max_wait)

    too_few = largest(lambda copies: not enough(copies), _MOST_COPIES)
    fewest = None if too_few == _MOST_COPIES else too_few + 1
    slow_copies = None
    if fewest is not None and speed.roofline is not None:
        more = largest(is_too_few, _MOST_COPIES - too_few)
        slow_copies = None if too_few + more == _MOST_COPIES else fewest + more
    tried = tuple(
        Copies(
            number, number * served.cards, one.most_used, one.preemptions, one.wait_p99, _enough(one, max_wait),
            one.given_up_at,
        )
        for number, one in sorted(answers.items())
    )  # fmt: skip
    cards = None if fewest is None else fewest * served.cards
    rules = make().rules
    return LoadReport(described, rules, speed, answers[1], max_wait, fewest, cards, tried, slow_copies, answered, price)


def _enough(answer: LoadAnswer, max_wait: float) -> bool:
    return answer.given_up_at is None and answer.wait_p99 <= max_wait


def simulate(
    scheduler: Scheduler,
    requests: Sequence[Request],
    seconds: float,
    speed: Speed,
    bears: float | None = None,
    say: Progress = silent,
) -> LoadAnswer:
    """The load on one engine, from 0 to ``seconds``. Requests are in the order of their arrival. ``bears``: it is given
    up once the 99th percentile of waiting will be more than so many seconds; None: it is followed to the end."""
    return _Run(scheduler, requests, seconds, speed, bears, say).answer()


class _Run:
    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[Request],
        seconds: float,
        speed: Speed,
        bears: float | None,
        say: Progress,
    ) -> None:
        self._scheduler, self._requests, self._seconds, self._speed = scheduler, requests, seconds, speed
        self._bears, self._say = bears, say
        # What waits longest is at this place from the end, of all that arrive: so many may not wait too long.
        self._may_be_late = len(requests) - int(_MOST_PART * len(requests)) - 1
        self._late = 0
        self._given_up_at: float | None = None
        self._now = 0.0
        self._next = 0
        self._first_step: dict[int, float] = {}
        self._waits: list[float] = []
        self._refused: set[int] = set()
        self._preempted: dict[int, int] = {}
        self._first_preemption: float | None = None
        self._steps = self._tokens = self._finished = 0
        self._area = self._most_used = 0.0
        self._most_running = self._most_waiting = 0
        self._points: list[list[float]] = [[0.0, 0, 0, 0] for _ in range(_POINTS)]

    def answer(self) -> LoadAnswer:
        self._follow()
        until = self._seconds if self._given_up_at is None else self._given_up_at
        late = [until - request.arrival for request in self._unbegun()]
        waits = sorted([*self._waits, *late])
        return LoadAnswer(
            requests=len(self._requests),
            finished=self._finished,
            refused=len(self._refused),
            left_waiting=len(late),
            seconds=self._seconds,
            steps=self._steps,
            tokens_computed=self._tokens,
            tokens_computed_again=self._scheduler.lost_tokens,
            mean_used=self._area / until,
            most_used=self._most_used,
            most_running=self._most_running,
            most_waiting=self._most_waiting,
            preemptions=sum(self._preempted.values()),
            preempted_requests=len(self._preempted),
            first_preemption=self._first_preemption,
            wait_p50=_quantile(waits, 0.5),
            wait_p99=_quantile(waits, _MOST_PART),
            timeline=tuple(
                Point(self._seconds * index / _POINTS, used, int(running), int(waiting), int(preemptions))
                for index, (used, running, waiting, preemptions) in enumerate(self._points)
            ),
            given_up_at=self._given_up_at,
        )

    def _unbegun(self) -> list[Request]:
        arrived = self._requests if self._given_up_at is None else self._requests[: self._next]
        return [
            request
            for number, request in enumerate(arrived)
            if number not in self._first_step and number not in self._refused
        ]

    def _follow(self) -> None:
        """Batches are asked for and come back; as many are under way as the engine has (``batches_in_flight``)."""
        pending: deque[tuple[Batch, float]] = deque()
        free_at = 0.0
        while self._now < self._seconds and self._steps < _MOST_STEPS:
            self._arrive()
            if self._steps % _PROGRESS_EVERY == 0:
                self._say(f"{self._now / self._seconds:.0%} of the time")
            if self._late > self._may_be_late:
                self._given_up_at = self._now
                return
            batch = self._scheduler.schedule()
            self._note(batch)
            if batch.entries:
                free_at = max(free_at, self._now) + self._speed.of(batch)
                pending.append((batch, free_at))
                if len(pending) < self._scheduler.batches_in_flight:
                    continue
            if pending:
                oldest, at = pending.popleft()
                self._advance(max(at, self._now))
                self._finished += len(self._scheduler.update(oldest))
            elif self._next < len(self._requests):
                self._advance(max(self._now, self._requests[self._next].arrival))
            else:
                self._advance(self._seconds)
        if self._steps >= _MOST_STEPS:
            raise UsageError(f"the load takes more than {_MOST_STEPS:,} steps; give a shorter --duration")

    def _arrive(self) -> None:
        while self._next < len(self._requests) and self._requests[self._next].arrival <= self._now:
            request = self._requests[self._next]
            if self._scheduler.fits(request):
                self._scheduler.add(self._next, request)
            else:
                self._refused.add(self._next)
            self._next += 1

    def _advance(self, to: float) -> None:
        to = min(to, self._seconds)
        self._area += self._used() * (to - self._now)
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
        self._most_used = max(self._most_used, self._used())
        self._most_running = max(self._most_running, self._scheduler.running)
        self._most_waiting = max(self._most_waiting, self._scheduler.waiting)
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
                waited = self._now - self._requests[number].arrival
                self._waits.append(waited)
                self._late += self._bears is not None and waited > self._bears


def _quantile(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
