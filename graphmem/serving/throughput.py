"""Tokens a second of a busy engine, and what a million of them cost, each with the interval of the roofline."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from graphmem.errors import UsageError
from graphmem.serving.base import Engine, Question, Served
from graphmem.serving.roofline import FAST, SLOW, Roofline, of_engine

#: Tokens of a step that reads prompts, where the engine names no most.
_STEP_TOKENS = 8192
#: Options with which a step is another.
_UNKNOWN = re.compile("speculative|cpu_offload|pipeline_parallel|pp$").match


@dataclass(frozen=True)
class Interval:
    """A figure as expected, with a slow engine and with a fast one (:data:`graphmem.serving.roofline.SLOW`)."""

    slow: float
    expected: float
    fast: float


@dataclass(frozen=True)
class Throughput:
    """An engine with so many requests at once of ``context`` tokens each: tokens of answers a second of all of them
    together, or, while it reads prompts of so many tokens, of prompts. ``price``: dollars an hour of its cards."""

    requests: int
    context: int
    answers: Interval
    prompts: Interval
    price: float | None = None

    @property
    def each(self) -> float:
        """Tokens a second that one of the requests is expected to get."""
        return self.answers.expected / self.requests

    @property
    def answers_cost(self) -> Interval | None:
        """Dollars of a million tokens of answers, beside those of their prompts."""
        return _million(self.price, self.answers)

    @property
    def prompts_cost(self) -> Interval | None:
        """Dollars of a million tokens of prompts."""
        return _million(self.price, self.prompts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: tokens a second, dollars."""
        costs = {"answers_cost": self.answers_cost, "prompts_cost": self.prompts_cost}
        return {**asdict(self), **{name: None if one is None else asdict(one) for name, one in costs.items()}}


def line_of(engine: Engine, question: Question, served: Served) -> Roofline | None:
    """The roofline of an engine's answer; None where it does not start, where no benchmarks of the engine hold it, or
    for what it does not know: a card, a model, drafts, weights on the host, pipelines."""
    names = (name.replace("-", "_") for name, _ in question.arguments)
    if served.refusal is not None or not getattr(engine, "has_benchmarks", False) or any(map(_UNKNOWN, names)):
        return None
    try:
        return of_engine(question.model, question.device, served, question.quantization)
    except UsageError:
        return None


def throughput(line: Roofline, served: Served, requests: int, context: int, price: float | None) -> Throughput:
    """The throughput of an engine by its roofline."""
    step = int(served.settings.get("max_num_batched_tokens") or _STEP_TOKENS)
    reading = line.seconds(step, max(1, step // context), max(step, context), step * context / 2)
    answers, prompts = requests / line.answering(requests, context), step / reading
    return Throughput(requests, context, _interval(answers), _interval(prompts), price)


def _interval(expected: float) -> Interval:
    return Interval(SLOW * expected, expected, FAST * expected)


def _million(price: float | None, speed: Interval) -> Interval | None:
    return None if price is None else Interval(*(price / 3600 * 1e6 / one for one in vars(speed).values()))
