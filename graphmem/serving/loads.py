"""Loads: requests over time, drawn from a rate and lengths, or read from a file of somebody's server."""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import NormalDist

from graphmem.base.documents import read_lines, shown
from graphmem.errors import SourceError, UsageError
from graphmem.serving.base import Request

#: Requests of a load, and bytes of a line of its file.
_MOST_REQUESTS, _LONGEST_LINE = 1_000_000, 10_000
_MOST_TOKENS = 1 << 31
#: Seconds of the part of a longer load by which cards are chosen.
HOUR = 3600.0
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"(\d{1,12}(?:\.\d{1,9})?)"
#: Names of columns: ours, and those of the traces that Microsoft publishes (Azure/AzurePublicDataset, LLM inference).
_COLUMNS = {
    "timestamp": ("timestamp", "time", "arrival"),
    "prompt": ("prompt", "contexttokens", "input", "prompt_tokens"),
    "output": ("output", "generatedtokens", "output_tokens", "completion_tokens"),
}

Quantiles = Sequence[tuple[float, int]]


def parse_seconds(text: str, option: str) -> float:
    """``"1h"``, ``"90s"``, ``"25ms"``, ``"5"`` as seconds. Raises :class:`UsageError`."""
    match = re.fullmatch(_NUMBER + r"\s*(ms|s|min|m|h|d|)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not seconds:
        raise UsageError(f"{option} {text!r} is no time; write for example 1h, 90s or 25ms")
    return seconds


def parse_rate(text: str) -> float:
    """``"5/s"``, ``"300/min"``, ``"20000/d"`` as requests a second. Raises :class:`UsageError`."""
    match = re.fullmatch(_NUMBER + r"\s*/\s*(s|min|m|h|d)", text.strip().lower())
    rate = float(match[1]) / _UNITS[match[2]] if match else 0.0
    if not rate:
        raise UsageError(f"--arrivals {text!r} is no rate; write for example 5/s, 300/min or 20000/d")
    return rate


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


def drawn(
    rate: float, seconds: float, prompts: Quantiles, outputs: Quantiles, longest: int, seed: int = 0
) -> tuple[Request, ...]:
    """Requests of a Poisson process of ``rate`` a second, with lengths of the two distributions, cut to ``longest``
    tokens together. The same for the same seed. Raises :class:`UsageError` for more than a million."""
    if rate * seconds > _MOST_REQUESTS:
        raise UsageError(
            f"--arrivals over --duration are {rate * seconds:,.0f} requests; at most {_MOST_REQUESTS:,} are followed: "
            "give a shorter --duration"
        )
    rng = random.Random(seed)
    prompt_at, output_at = length_at(prompts), length_at(outputs)
    found: list[Request] = []
    at = rng.expovariate(rate)
    while at < seconds and len(found) < _MOST_REQUESTS:
        prompt = max(1, min(longest - 1, round(prompt_at(_open(rng)))))
        output = max(1, min(longest - prompt, round(output_at(_open(rng)))))
        found.append(Request(at, prompt, output))
        at += rng.expovariate(rate)
    return tuple(found)


def busiest(requests: Sequence[Request]) -> tuple[Request, ...]:
    """The requests of the hour with the most tokens, the first of which arrives at 0; all of a shorter load."""
    first = tokens = most = 0
    hour = (0, 0)
    for last, request in enumerate(requests, 1):
        tokens += request.prompt + request.output
        while request.arrival - requests[first].arrival >= HOUR:
            tokens -= requests[first].prompt + requests[first].output
            first += 1
        if tokens > most:
            most, hour = tokens, (first, last)
    start = requests[hour[0]].arrival if requests else 0.0
    return tuple(replace(request, arrival=request.arrival - start) for request in requests[slice(*hour)])


def _open(rng: random.Random) -> float:
    """A probability strictly between 0 and 1."""
    return min(max(rng.random(), 1e-9), 1 - 1e-9)


def read(path: Path) -> tuple[Request, ...]:
    """The requests of a CSV file with columns timestamp (seconds, or a date and time), prompt and output (tokens); the
    first arrives at 0. Raises :class:`SourceError` naming the line."""
    try:
        found = list(_rows(path, csv.reader(_lines(path))))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    except csv.Error as error:
        raise SourceError(f"{path} is no CSV file: {error}") from None
    if not found:
        raise SourceError(f"{path} has no requests")
    found.sort()
    first = found[0][0]
    return tuple(Request(at - first, prompt, output) for at, prompt, output in found)


def _lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path, _LONGEST_LINE), 1):
        if number > _MOST_REQUESTS + 1:
            raise SourceError(f"{path} has more than {_MOST_REQUESTS:,} requests, which are the most that are followed")
        yield line


def _rows(path: Path, rows: Iterator[list[str]]) -> Iterator[tuple[float, int, int]]:
    header = [name.strip().lower() for name in next(rows, [])]
    places = []
    for wanted, names in _COLUMNS.items():
        name = next((name for name in names if name in header), None)
        if name is None:
            raise SourceError(f"{path}, line 1: no column {wanted!r}; the file needs timestamp,prompt,output")
        if header.count(name) > 1:
            raise SourceError(f"{path}, line 1: {header.count(name)} columns {name!r}; leave one of them")
        places.append(header.index(name))
    for number, row in enumerate(rows, 2):
        if row:
            try:
                at, prompt, output = (row[place].strip() for place in places)
                yield _instant(at), _tokens(prompt), _tokens(output)
            except (ValueError, IndexError, OverflowError):
                raise SourceError(
                    f"{path}, line {number}: {shown(','.join(row))}; accepted: a time, and tokens of the prompt and of "
                    f"the answer from 1 to {_MOST_TOKENS}"
                ) from None


def _instant(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:  # digits beyond a microsecond are more than datetime reads
        seconds = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)).timestamp()
    if not math.isfinite(seconds) or abs(seconds) > 1e12:
        raise ValueError(text)
    return seconds


def _tokens(text: str) -> int:
    if not re.fullmatch(r"\d{1,10}", text) or not 1 <= int(text) <= _MOST_TOKENS:
        raise ValueError(text)
    return int(text)
