"""How many copies of an engine a load needs: all day, interval by interval, and with engines that only prefill beside
others that only decode.

Requests are dealt out in turn, and the first copy stands for all. Enough are they where 99 % of its requests wait no
longer, and their tokens come no slower, than is wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphmem.answering.runs import Progress, labelled, silent
from graphmem.base.searching import largest
from graphmem.errors import UsageError
from graphmem.serving.base import Request, Served
from graphmem.serving.load_options import OverTime
from graphmem.serving.loads import HOUR
from graphmem.serving.over_time import Course, LoadAnswer, Speed
from graphmem.serving.roofline import SLOW

#: Tokens of all answers of a load, and copies that are tried.
_MOST_ANSWERED, _MOST_COPIES = 300_000_000, 1 << 10
#: Seconds of a load that one copy follows to its end, whatever comes of it; of a longer one, and on more copies, no
#: more than shows that too many wait too long.
_WHOLE = HOUR
#: Seconds before an interval whose requests are followed with it, for an engine that is not empty when it begins: about
#: the time of one long request, which has a thousand tokens to answer at 50 ms each.
_BEFORE = 60.0


@dataclass(frozen=True)
class Layout:
    """Engines that carry a load: their cards, and the 99th percentiles of seconds to a request's first token and of
    each one behind it."""

    cards: int
    ttft_p99: float
    tpot_p99: float


@dataclass(frozen=True)
class Copies(Layout):
    """The same load dealt out in turn to so many copies: the requests of the first of them, until the end or for
    ``followed`` seconds, after which it could not be enough any more. Figures as in :class:`LoadAnswer`; ``found``: the
    part of the tokens that was in the prefix cache, or on the host."""

    copies: int
    most_used: float
    preemptions: int
    wait_p99: float
    found: float
    enough: bool
    followed: float | None = None


@dataclass(frozen=True)
class Apart(Layout):
    """The fewest engines that only ``prefill``, and those that only ``decode`` for them. A request's keys and values
    are ``moved_bytes`` on average, of all its cards together. Times are of requests from their arrival at the first."""

    prefill: int
    decode: int
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
    wanted: OverTime
    copies: int | None
    cards: int | None
    tried: tuple[Copies, ...]
    slow_copies: int | None = None
    answered: int = 0
    price: float | None = None
    apart: Apart | None = None
    scaling: Scaling | None = None

    def costs_of(self, copies: int | None) -> tuple[float | None, float | None]:
        """Dollars of so many copies an hour, and of a million tokens of answers, their prompts and idle cards included;
        None without a price."""
        if self.price is None or copies is None:
            return None, None
        price = self.price * copies
        return price, price * self.answer.seconds / HOUR / max(1, self.answered) * 1e6

    @property
    def price_of_all(self) -> float | None:
        """Dollars an hour of the copies that are enough."""
        return self.costs_of(self.copies)[0]

    @property
    def answers_cost(self) -> float | None:
        """Dollars of a million tokens of their answers."""
        return self.costs_of(self.copies)[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(replace(self, speed=Speed())) | {"speed": self.speed.to_dict()}
        wanted = values.pop("wanted")
        costs = {"price_of_all": self.price_of_all, "answers_cost": self.answers_cost}
        return {**values, "max_wait": wanted["max_wait"], "max_tpot": wanted["max_tpot"], **costs}


def unscheduled(engine: str) -> str:
    """The refusal of a load on an engine whose scheduler is not followed."""
    return f"{engine}: its scheduler is not followed; --arrivals and --trace want --engine vllm or sglang"


def loaded(
    served: Served, requests: Sequence[Request], seconds: float, speed: Speed, wanted: OverTime, described: str,
    say: Progress = silent, price: float | None = None,
) -> LoadReport:  # fmt: skip
    """The load on an engine that starts. Raises :class:`UsageError` for an engine whose scheduler is not followed."""
    if served.scheduler is None:
        raise UsageError(unscheduled(served.engine))
    if served.refusal is not None:
        raise UsageError(f"the engine does not start, so nothing arrives: {served.refusal}")
    # An engine of one role leaves out what one of both does not; some models are refused it.
    rules = served.scheduler("prefill" if wanted.disaggregated else "").rules
    answered = sum(request.output for request in requests)
    if answered > _MOST_ANSWERED:
        raise UsageError(
            f"the load's answers have {answered:,} tokens; at most {_MOST_ANSWERED:,} are followed: give a shorter "
            "--duration or --trace"
        )
    fleet = _Fleet(served, requests, seconds, speed, wanted, say)
    answers: dict[int, LoadAnswer] = {}

    def enough(copies: int) -> bool:
        answers[copies] = fleet.answer(copies, gives_up=copies > 1 or seconds > _WHOLE)
        return fleet.is_met(answers[copies])

    fewest = _fewest(enough)
    return LoadReport(
        described, rules, speed, answers[1], wanted, fewest, None if fewest is None else fewest * served.cards,
        tuple(fleet.copies(number, one) for number, one in sorted(answers.items())),
        None if fewest is None else fleet.slow_copies(fewest), answered, price,
        fleet.apart(price) if wanted.disaggregated else None,
        None if wanted.autoscale is None or fewest is None else fleet.scaled(wanted.autoscale, fewest, price),
    )  # fmt: skip


def _fewest(enough: Callable[[int], bool], least: int = 1) -> int | None:
    """The fewest copies, from ``least`` on, that are enough; None where 1,024 are not."""
    too_few = largest(lambda more: not enough(least - 1 + more), _MOST_COPIES + 1 - least)
    return None if least + too_few > _MOST_COPIES else least + too_few


@dataclass(frozen=True)
class _Fleet:
    """Copies of an engine under a load."""

    served: Served
    requests: Sequence[Request]
    seconds: float
    speed: Speed
    wanted: OverTime
    say: Progress

    def is_met(self, answer: LoadAnswer) -> bool:
        """True where 99 % of requests wait as short, and get their tokens as fast, as is wanted."""
        wanted = self.wanted
        paced = wanted.max_tpot is None or answer.tpot_p99 <= wanted.max_tpot
        return answer.given_up_at is None and answer.wait_p99 <= wanted.max_wait and paced and not answer.refuses_many

    def answer(self, copies: int, gives_up: bool = True) -> LoadAnswer:
        """The load on the first of so many copies, followed."""
        return self._course(self.requests[::copies], f"{copies:,} like this", gives_up).answer()

    def are_enough(self, copies: int) -> bool:
        """True where so many copies bear the load."""
        return self.is_met(self.answer(copies))

    def copies(self, number: int, answer: LoadAnswer) -> Copies:
        """So many copies, by the answer of the first."""
        return Copies(
            number * self.served.cards, answer.ttft_p99, answer.tpot_p99, number, answer.most_used, answer.preemptions,
            answer.wait_p99, (answer.found_tokens + answer.loaded_tokens) / max(1, answer.asked_tokens),
            self.is_met(answer), answer.given_up_at,
        )  # fmt: skip

    def slow_copies(self, fewest: int) -> int | None:
        """The fewest copies at the slow end of a predicted speed; None of one that is not, and where 1,024 are not
        enough."""
        if self.speed.roofline is None:
            return None
        return _fewest(replace(self, speed=replace(self.speed, part=SLOW)).are_enough, fewest)

    @property
    def _token_bytes(self) -> float:
        """Of a token's keys and values on one card."""
        return self.served.kv_cache.block_bytes / self.served.kv_cache.block_size

    def _course(
        self, requests: Sequence[Request], named: str, gives_up: bool = True, role: str = "",
        since: Sequence[float] = (),
    ) -> Course:  # fmt: skip
        """These requests on one engine, followed."""
        assert self.served.scheduler is not None
        course = Course(
            self.served.scheduler(role), requests, self.seconds, self.speed,
            self.wanted.max_wait if gives_up else None,
            self._token_bytes / self.wanted.kv_links[0 if role else 1], since,
        )  # fmt: skip
        course.follow(labelled(self.say, f"the load on {named}"))
        return course

    # --- prefill and decode apart -------------------------------------------------------------------------------------

    def apart(self, price: float | None) -> Apart | None:
        """The fewest engines of each kind; None where 1,024 of one are not enough."""
        reading = replace(
            self, requests=[replace(one, output=1) for one in self.requests],
            wanted=replace(self.wanted, max_tpot=None),
        )  # fmt: skip
        prefill = _fewest(lambda copies: reading.is_met(reading._prefilled(copies).answer()))
        if prefill is None:
            return None
        read: list[tuple[float, int]] = []
        for copy in range(prefill):
            course = reading._prefilled(prefill, copy, gives_up=False)
            read += ((at, copy + number * prefill) for number, at in course.first_token.items())
        read.sort()
        decoding = [replace(self.requests[number], arrival=at) for at, number in read]
        asked = [self.requests[number].arrival for _, number in read]

        def decoded(copies: int) -> LoadAnswer:
            named = f"{copies:,} that decode"
            return self._course(decoding[::copies], named, role="decode", since=asked[::copies]).answer()

        decode = _fewest(lambda copies: self.is_met(decoded(copies)))
        if decode is None:
            return None
        last, engines = decoded(decode), prefill + decode
        moved = last.loaded_tokens / max(1, last.requests) * self._token_bytes * self.served.cards
        return Apart(
            engines * self.served.cards, last.ttft_p99, last.tpot_p99, prefill, decode, moved,
            None if price is None else engines * price,
        )  # fmt: skip

    def _prefilled(self, copies: int, copy: int = 0, gives_up: bool = True) -> Course:
        """The prompts on one of so many engines that prefill."""
        return self._course(self.requests[copy::copies], f"{copies:,} that prefill", gives_up, role="prefill")

    # --- copies that follow the load ----------------------------------------------------------------------------------

    def scaled(self, interval: float, fixed: int, price: float | None) -> Scaling:
        """Copies that change every ``interval`` seconds."""
        startup = self.wanted.startup
        intervals = tuple(self._intervals(interval))
        seconds, before = 0.0, 0
        for one in intervals:
            copies = fixed if one.copies is None else one.copies
            seconds += copies * min(interval, self.seconds - one.seconds) + max(0, copies - before) * startup
            before = copies
        hours, whole = seconds / HOUR, fixed * (self.seconds + startup) / HOUR
        costs = (None, None) if price is None else (hours * price, whole * price)
        return Scaling(interval, startup, intervals, hours, fixed, whole, *costs)

    def _intervals(self, interval: float) -> Iterator[Interval]:
        arrivals = [request.arrival for request in self.requests]
        start = 0.0
        while start < self.seconds:
            until = min(start + interval, self.seconds)
            lead = min(start, _BEFORE)
            first, begun, last = (bisect_left(arrivals, at) for at in (start - lead, start, until))
            part = [replace(one, arrival=one.arrival - start + lead) for one in self.requests[first:last]]
            fleet = replace(self, requests=part, seconds=lead + until - start)
            yield Interval(start, last - begun, _fewest(fleet.are_enough) if part else 0)
            start = until
