"""How many copies of an engine a load needs: all day, interval by interval, and with engines that only prefill beside
others that only decode.

Requests are dealt out in turn, and the first copy stands for all. Enough are they where 99 % of its requests wait no
longer, and their tokens come no slower, than is borne (:class:`Wanted`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from graphmem.answering.runs import Progress, labelled, silent
from graphmem.base.searching import largest
from graphmem.errors import UsageError
from graphmem.serving.base import Request, Served
from graphmem.serving.over_time import Course, LoadAnswer, Speed
from graphmem.serving.roofline import SLOW

#: Tokens of all answers of a load, and copies that are tried.
_MOST_ANSWERED, _MOST_COPIES = 300_000_000, 1 << 10
#: Seconds of a load that one copy follows to its end, whatever comes of it; of a longer one, and on more copies, no
#: more than shows that too many wait too long.
_WHOLE = 3600.0
#: Seconds before an interval whose requests are followed with it.
_BEFORE = 60.0


@dataclass(frozen=True)
class Wanted:
    """What is wanted of the engines: the 99th percentile of requests waits at most ``max_wait`` seconds, and gets a
    token every ``max_tpot``; whether they prefill and decode ``apart``; ``interval`` seconds after which their number
    may change, where one takes ``startup`` to start. ``network`` and ``host``: bytes a second of a card to other
    engines and to its host."""

    max_wait: float = 10.0
    max_tpot: float | None = None
    apart: bool = False
    interval: float | None = None
    startup: float = 300.0
    network: float = 50e9
    host: float = 32e9

    def is_met(self, answer: LoadAnswer) -> bool:
        """True where so many copies are enough."""
        paced = self.max_tpot is None or answer.tpot_p99 <= self.max_tpot
        return answer.given_up_at is None and answer.wait_p99 <= self.max_wait and paced and not answer.refuses_many


@dataclass(frozen=True)
class Copies:
    """The same load dealt out in turn to so many copies: the requests of the first of them, until the end or for
    ``followed`` seconds, after which it could not be enough any more. Times as in :class:`LoadAnswer`; ``found``: the
    part of the tokens that was in the prefix cache, or on the host."""

    copies: int
    cards: int
    most_used: float
    preemptions: int
    wait_p99: float
    ttft_p99: float
    tpot_p99: float
    found: float
    enough: bool
    followed: float | None = None


@dataclass(frozen=True)
class Apart:
    """The fewest engines that only ``prefill``, and those that only ``decode`` for them. A request's keys and values
    are ``moved_bytes`` on average, of all its cards together. Times are of requests from their arrival at the first."""

    prefill: int
    decode: int
    cards: int
    ttft_p99: float
    tpot_p99: float
    moved_bytes: float
    price_of_all: float | None = None


@dataclass(frozen=True)
class Interval:
    """A part of the time, from ``seconds`` on: requests that arrive, and the fewest copies, None if not even 1,024."""

    seconds: float
    requests: int
    copies: int | None


@dataclass(frozen=True)
class Scaling:
    """Copies that follow the load every ``interval`` seconds, each started ``startup`` seconds before it is needed, as
    one who knows the load would. Hours of all copies together, of as many as are ``fixed`` too; dollars."""

    interval: float
    startup: float
    intervals: tuple[Interval, ...]
    copy_hours: float
    fixed: int
    fixed_hours: float
    cost: float | None = None
    fixed_cost: float | None = None


@dataclass(frozen=True)
class LoadReport:
    """A load on one copy, and the fewest copies that it needs. None where 1,024 are not enough. ``tried`` are all that
    were looked at. ``slow_copies``: the same at the slow end of a predicted speed. ``answered``: tokens of all answers,
    ``price``: dollars an hour of a copy."""

    described: str
    rules: str
    speed: Speed
    answer: LoadAnswer
    wanted: Wanted
    copies: int | None
    cards: int | None
    tried: tuple[Copies, ...]
    slow_copies: int | None = None
    answered: int = 0
    price: float | None = None
    apart: Apart | None = None
    scaling: Scaling | None = None

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
        values = asdict(replace(self, speed=Speed())) | {"speed": self.speed.to_dict()}
        wanted = values.pop("wanted")
        costs = {"price_of_all": self.price_of_all, "answers_cost": self.answers_cost}
        return {**values, "max_wait": wanted["max_wait"], "max_tpot": wanted["max_tpot"], **costs}


def unscheduled(engine: str) -> str:
    """The refusal of a load on an engine whose scheduler is not followed."""
    return f"{engine}: its scheduler is not followed; --arrivals and --trace want --engine vllm"


def loaded(
    served: Served, requests: Sequence[Request], seconds: float, speed: Speed, wanted: Wanted, described: str,
    say: Progress = silent, price: float | None = None,
) -> LoadReport:  # fmt: skip
    """The load on an engine that starts. Raises :class:`UsageError` for an engine whose scheduler is not followed."""
    if served.scheduler is None:
        raise UsageError(unscheduled(served.engine))
    if served.refusal is not None:
        raise UsageError(f"the engine does not start, so nothing arrives: {served.refusal}")
    if wanted.apart:
        served.scheduler("prefill")  # which is refused for some models
    answered = sum(request.output for request in requests)
    if answered > _MOST_ANSWERED:
        raise UsageError(
            f"the load's answers have {answered:,} tokens; at most {_MOST_ANSWERED:,} are followed: give a shorter "
            "--duration or --trace"
        )
    fleet = _Fleet(served, seconds, speed, wanted, say)
    answers: dict[int, LoadAnswer] = {}

    def enough(copies: int) -> bool:
        whole = copies == 1 and seconds <= _WHOLE
        answers[copies] = fleet.answer(requests[::copies], f"{copies:,} like this", gives_up=not whole)
        return wanted.is_met(answers[copies])

    fewest = _fewest(enough)
    slow_copies = None
    if fewest is not None and speed.roofline is not None:
        slow = replace(fleet, speed=replace(speed, part=SLOW))
        slow_copies = _fewest(partial(slow.are_enough, requests), fewest)
    tried = tuple(
        Copies(
            number, number * served.cards, one.most_used, one.preemptions, one.wait_p99, one.ttft_p99, one.tpot_p99,
            (one.found_tokens + one.loaded_tokens) / max(1, one.asked_tokens), wanted.is_met(one), one.given_up_at,
        )
        for number, one in sorted(answers.items())
    )  # fmt: skip
    return LoadReport(
        described, served.scheduler().rules, speed, answers[1], wanted, fewest,
        None if fewest is None else fewest * served.cards, tried, slow_copies, answered, price,
        fleet.apart(requests, price) if wanted.apart else None,
        None if wanted.interval is None or fewest is None else fleet.scaled(requests, fewest, price),
    )  # fmt: skip


def _fewest(enough: Callable[[int], bool], least: int = 1) -> int | None:
    """The fewest copies, from ``least`` on, that are enough; None where 1,024 are not."""
    too_few = largest(lambda more: not enough(least - 1 + more), _MOST_COPIES + 1 - least)
    return None if least + too_few > _MOST_COPIES else least + too_few


@dataclass(frozen=True)
class _Fleet:
    """Copies of an engine under a load."""

    served: Served
    seconds: float
    speed: Speed
    wanted: Wanted
    say: Progress

    @property
    def _token_bytes(self) -> float:
        """Of a token's keys and values on one card."""
        return self.served.kv_cache.block_bytes / self.served.kv_cache.block_size

    def course(
        self, requests: Sequence[Request], named: str, gives_up: bool = True, role: str = "",
        since: Sequence[float] = (),
    ) -> Course:  # fmt: skip
        """The load on the first of so many copies, followed."""
        assert self.served.scheduler is not None
        course = Course(
            self.served.scheduler(role), requests, self.seconds, self.speed,
            self.wanted.max_wait if gives_up else None,
            self._token_bytes / (self.wanted.network if role else self.wanted.host), since,
        )  # fmt: skip
        course.follow(labelled(self.say, f"the load on {named}"))
        return course

    def answer(self, requests: Sequence[Request], named: str, gives_up: bool = True) -> LoadAnswer:
        """The same, in figures."""
        return self.course(requests, named, gives_up).answer()

    def are_enough(self, requests: Sequence[Request], copies: int) -> bool:
        """True where so many copies bear the load."""
        return self.wanted.is_met(self.answer(requests[::copies], f"{copies:,}"))

    def apart(self, requests: Sequence[Request], price: float | None) -> Apart | None:
        """The fewest engines of each kind; None where 1,024 of one are not enough."""
        prompts = [replace(request, output=1) for request in requests]
        reading = replace(self, wanted=replace(self.wanted, max_tpot=None))

        def enough(copies: int) -> bool:
            course = reading.course(prompts[::copies], f"{copies:,} that prefill", role="prefill")
            return reading.wanted.is_met(course.answer())

        prefill = _fewest(enough)
        if prefill is None:
            return None
        read: list[tuple[float, int]] = []
        for copy in range(prefill):
            course = reading.course(prompts[copy::prefill], f"{prefill:,} that prefill", gives_up=False, role="prefill")
            read += ((at, copy + number * prefill) for number, at in course.first_token.items())
        read.sort()
        decoding = [replace(requests[number], arrival=at) for at, number in read]
        asked = [requests[number].arrival for _, number in read]

        def answer(copies: int) -> LoadAnswer:
            named = f"{copies:,} that decode"
            return self.course(decoding[::copies], named, role="decode", since=asked[::copies]).answer()

        decode = _fewest(lambda copies: self.wanted.is_met(answer(copies)))
        if decode is None:
            return None
        last = answer(decode)
        engines = prefill + decode
        moved = last.loaded_tokens / max(1, last.requests) * self._token_bytes * self.served.cards
        return Apart(
            prefill, decode, engines * self.served.cards, last.ttft_p99, last.tpot_p99, moved,
            None if price is None else engines * price,
        )  # fmt: skip

    def scaled(self, requests: Sequence[Request], fixed: int, price: float | None) -> Scaling:
        """Copies that follow the load."""
        interval, startup = self.wanted.interval or self.seconds, self.wanted.startup
        intervals = tuple(self._intervals(requests, interval))
        hours, before = 0.0, 0
        for one in intervals:
            copies = fixed if one.copies is None else one.copies
            length = min(interval, self.seconds - one.seconds)
            hours += (copies * length + max(0, copies - before) * startup) / 3600
            before = copies
        whole = (fixed * self.seconds + fixed * startup) / 3600
        costs = (None, None) if price is None else (hours * price, whole * price)
        return Scaling(interval, startup, intervals, hours, fixed, whole, *costs)

    def _intervals(self, requests: Sequence[Request], interval: float) -> Iterator[Interval]:
        arrivals = [request.arrival for request in requests]
        start = 0.0
        while start < self.seconds:
            until = min(start + interval, self.seconds)
            lead = min(start, _BEFORE)
            first, begun, last = (bisect_left(arrivals, at) for at in (start - lead, start, until))
            part = [replace(one, arrival=one.arrival - start + lead) for one in requests[first:last]]
            fleet = replace(self, seconds=lead + until - start)
            yield Interval(start, last - begun, _fewest(partial(fleet.are_enough, part)) if part else 0)
            start = until
