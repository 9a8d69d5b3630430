"""Lengths of requests as a distribution: a few quantiles, and the requests that an engine's cache holds of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from graphmem.errors import UsageError
from graphmem.serving.base import Served, spelled

#: Points of a distribution of lengths: (percent of requests, tokens of the longest of these), rising.
Quantiles = tuple[tuple[float, int], ...]
#: How many requests a distribution is looked at by.
_SAMPLES = 200
#: Requests that an engine which names no most may run at once.
MOST_SEQS = 1 << 16


def quantiles_of(name: str, given: object) -> Quantiles:
    """``"p50=800,p99=6000"`` or ``{50: 800, 99: 6000}`` as (percent, length), rising. Raises :class:`UsageError`."""
    if isinstance(given, str):
        pairs = [_quantile(name, part.strip()) for part in given.split(",")]
    else:
        pairs = [(float(percent), length) for percent, length in dict(given or ()).items()]  # type: ignore[call-overload]
    pairs.sort()
    for (percent, length), before in zip(pairs, [(0.0, 0), *pairs], strict=False):
        if not 0 < percent < 100 or length < 1:
            raise UsageError(f"{name}: p{percent:g}={length}; accepted: percents between 0 and 100, lengths from 1 on")
        if percent == before[0] or length < before[1]:
            raise UsageError(f"{name}: p{percent:g}={length} comes after p{before[0]:g}={before[1]}; they must rise")
    return tuple(pairs)


def _quantile(name: str, text: str) -> tuple[float, int]:
    percent, _, length = text.partition("=")
    try:
        return float(percent.lower().removeprefix("p")), int(length)
    except ValueError:
        raise UsageError(
            f"{spelled(name)} {text!r} is not read; write whole numbers of tokens, for example p50=800,p99=6000"
        ) from None


def length_at(quantiles: Quantiles) -> Callable[[float], float]:
    """Length at a probability: straight lines through the given points, logarithms of lengths over the normal
    distribution's deviates (two points are a log-normal distribution); beyond the ends the nearest line goes on."""
    normal = NormalDist()
    points = [(normal.inv_cdf(percent / 100), math.log(length)) for percent, length in quantiles]
    if len(points) == 1:
        return lambda probability: math.exp(points[0][1])

    def length(probability: float) -> float:
        at = normal.inv_cdf(probability)
        right = next((number for number in range(1, len(points)) if points[number][0] >= at), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return math.exp(y0 + (at - x0) * (y1 - y0) / (x1 - x0))

    return length


def sampled(quantiles: Quantiles, served: Served) -> list[int]:
    """Lengths at evenly spaced quantiles (:func:`length_at`)."""
    longest = int(served.settings["max_model_len"])
    if len(quantiles) == 1:
        return [min(longest, quantiles[0][1])]
    at = length_at(quantiles)
    return [max(1, min(longest, round(at((index + 0.5) / _SAMPLES)))) for index in range(_SAMPLES)]


def held(served: Served, quantiles: Quantiles) -> float:
    """Requests of these lengths in the cache at once, of the longest ones where nothing is said of lengths."""
    return served.concurrency_at(sampled(quantiles, served)) if quantiles else served.kv_cache.concurrency


def at_once(served: Served, quantiles: Quantiles, load: float | None) -> tuple[int, int]:
    """Requests that the engine answers at once, those of the load or as many as it has room for, and their tokens."""
    lengths = sampled(quantiles, served) if quantiles else [int(served.settings["max_model_len"])]
    most = served.settings["max_num_seqs"] or MOST_SEQS
    room = min(most, max(1, int(held(served, quantiles))))
    return room if load is None else min(room, max(1, round(load))), round(sum(lengths) / len(lengths))
