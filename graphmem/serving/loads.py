"""Loads: requests over time, drawn from a rate and lengths, or read from a file of somebody's server."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from statistics import NormalDist

from graphmem.base.documents import read_lines, shown
from graphmem.errors import SourceError, UsageError
from graphmem.serving.base import Request

#: Requests of a load, and bytes of a line of its file.
_MOST_REQUESTS, _LONGEST_LINE = 1_000_000, 100_000
_MOST_TOKENS = 1 << 31
#: The part of prompts that may be shorter than the beginning which all should share.
_MOST_SHORTER = 0.9
#: Seconds of the part of a longer load by which cards are chosen.
HOUR = 3600.0
#: Seconds that a trace is followed beyond its last request.
_AFTER_A_TRACE = 60.0
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"(\d{1,12}(?:\.\d{1,9})?)"
#: Names of columns: ours, and those of the traces that Microsoft publishes (Azure/AzurePublicDataset, LLM inference).
_COLUMNS = {
    "timestamp": ("timestamp", "time", "arrival"),
    "prompt": ("prompt", "contexttokens", "input", "prompt_tokens"),
    "output": ("output", "generatedtokens", "output_tokens", "completion_tokens"),
    "prefix": ("prefix",),
    "prefix_tokens": ("prefix_tokens",),
}
_OPTIONAL = frozenset(("prefix", "prefix_tokens"))
#: Fields of the traces that Moonshot AI publishes (kvcache-ai/Mooncake, FAST25-release), and tokens of one hash there.
_LENGTHS, _HASHED = ("input_length", "output_length"), 512

Quantiles = Sequence[tuple[float, int]]
#: See :class:`graphmem.serving.base.Request`.
Shared = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Load:
    """A load that is asked for: from a file, or by a rate (requests a second) and lengths; ``prefix``: tokens that all
    prompts begin with."""

    seconds: float
    described: str
    requests: tuple[Request, ...] = ()
    rate: float = 0.0
    prompts: Quantiles = ()
    outputs: Quantiles = ()
    prefix: int = 0

    def up_to(self, longest: int) -> tuple[Request, ...]:
        """The requests; answers that are drawn end where a request has so many tokens."""
        return self.requests or drawn(self.rate, self.seconds, self.prompts, self.outputs, longest, self.prefix)


def asked(
    arrivals: float | str | None, prompts: Quantiles, outputs: Quantiles, duration: float | str, trace: Path | None,
    prefix: int = 0,
) -> Load | None:  # fmt: skip
    """The load over time that is asked for, None without one. Raises :class:`graphmem.errors.GraphmemError`."""
    if not 0 <= prefix <= _MOST_TOKENS:
        raise UsageError(f"--shared-prefix {prefix}; accepted: tokens from 0 to {_MOST_TOKENS}")
    alike = f", all of which begin with the same {prefix:,} tokens" if prefix else ""
    if trace is not None:
        if arrivals is not None:
            raise UsageError("--arrivals and --trace: a load comes from one of them")
        requests = read(trace, prefix)
        described = f"{len(requests):,} requests of {trace.name}{alike}"
        return Load(requests[-1].arrival + _AFTER_A_TRACE, described, requests)
    if arrivals is None:
        if outputs or prefix:
            option = "--output-lengths" if outputs else "--shared-prefix"
            raise UsageError(f"{option} belongs to a load over time: give --arrivals, for example 5/s")
        return None
    if not prompts or not outputs:
        raise UsageError("--arrivals wants --lengths (of prompts) and --output-lengths, for example p50=800,p99=6000")
    rate = parse_rate(arrivals) if isinstance(arrivals, str) else float(arrivals)
    seconds = seconds_of(duration, "--duration")
    if not 0 < rate < math.inf:
        raise UsageError(f"arrivals {rate:g} a second; accepted: a number above 0")
    lasting = f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
    described = f"{rate:g} requests a second over {lasting}, drawn at random (seed 0){alike}"
    if shorter := _shorter(prompts, prefix):
        if shorter > _MOST_SHORTER:
            raise UsageError(
                f"--shared-prefix {prefix} is longer than nearly all prompts; --lengths have it among them"
            )
        described += f", or of fewer as {shorter:.0%} of prompts are shorter"
    return Load(seconds, described, (), rate, prompts, outputs, prefix)


def _shorter(prompts: Quantiles, prefix: int) -> float:
    """The part of prompts that are shorter than what they should share, in hundredths."""
    at = length_at(prompts)
    return sum(at(number / 100) < prefix for number in range(1, 100)) / 100


def seconds_of(given: float | str, option: str, bare: bool = True) -> float:
    """``"1h"``, ``"90s"``, ``"25ms"`` or a number as seconds; a ``bare`` number as text too. Raises
    :class:`UsageError`."""
    if not isinstance(given, str):
        if not 0 < given < math.inf:
            raise UsageError(f"{option} {given:g}; accepted: a number above 0")
        return float(given)
    match = re.fullmatch(_NUMBER + r"\s*(ms|s|min|m|h|d|)", given.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match and (match[2] or bare) else 0.0
    if not seconds:
        raise UsageError(f"{option} {given!r} is no time; write for example 1h, 90s or 25ms")
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
    rate: float, seconds: float, prompts: Quantiles, outputs: Quantiles, longest: int, prefix: int = 0, seed: int = 0
) -> tuple[Request, ...]:
    """Requests of a Poisson process of ``rate`` a second, with lengths of the two distributions; an answer ends where
    both are ``longest`` tokens. They begin with the same ``prefix`` tokens, or are all of them. The same for the same
    seed. Raises :class:`UsageError` for more than a million."""
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
        prompt = max(1, min(_MOST_TOKENS, round(prompt_at(_open(rng)))))
        output = max(1, min(longest - prompt, round(output_at(_open(rng)))))
        found.append(Request(at, prompt, output, _shared(prompt, prefix)))
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


def read(path: Path, prefix: int = 0) -> tuple[Request, ...]:
    """The requests of a file, the first of which arrives at 0; they begin with the same ``prefix`` tokens, or are all
    of them. A CSV file has columns timestamp (seconds, or a date and time), prompt and output (tokens); prefix and
    prefix_tokens where prompts begin alike. JSON lines are Mooncake's: timestamp (ms), input_length, output_length,
    hash_ids (each of 512 tokens). Raises :class:`SourceError` naming the line."""
    try:
        lines = _lines(path)
        first = next(lines, "")
        rows = _json_lines if first.lstrip().startswith("{") else _rows
        found = list(rows(path, chain([first], lines), prefix))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    except csv.Error as error:
        raise SourceError(f"{path} is no CSV file: {error}") from None
    if not found:
        raise SourceError(f"{path} has no requests")
    found.sort(key=lambda request: request.arrival)
    start = found[0].arrival
    return tuple(replace(request, arrival=request.arrival - start) for request in found)


def _shared(prompt: int, prefix: int, name: str = "", tokens: int = 0) -> Shared:
    """What a prompt begins with: what all do, and what others of this ``name`` do."""
    parts = (("", min(prefix, prompt)), (name, min(tokens, prompt)))
    return tuple(part for part, before in zip(parts, (0, parts[0][1]), strict=True) if part[1] > before)


def _json_lines(path: Path, lines: Iterable[str], prefix: int) -> Iterator[Request]:
    """Hashes that only one request has are its own. One with another before it is another one."""
    parsed = []
    nodes: dict[tuple[int, int], int] = {}
    uses: Counter[int] = Counter()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                at, (prompt, output) = float(row["timestamp"]) / 1000, map(_tokens, map(str, map(row.get, _LENGTHS)))
                names, node = [], 0
                for one in row.get("hash_ids", ()):
                    node = nodes.setdefault((node, one), len(nodes) + 1)
                    names.append(node)
                if not math.isfinite(at) or len(names) * _HASHED >= prompt + _HASHED:
                    raise ValueError
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                raise SourceError(
                    f"{path}, line {number}: {shown(line.strip())}; accepted: a JSON object with timestamp (ms), "
                    f"{_LENGTHS[0]} and {_LENGTHS[1]} (tokens from 1 to {_MOST_TOKENS}), hash_ids of 512 tokens each"
                ) from None
            uses.update(names)
            parsed.append((at, prompt, output, names))
    for at, prompt, output, names in parsed:
        ends = ((str(name), min(prompt, place * _HASHED)) for place, name in enumerate(names, 1) if uses[name] > 1)
        shared = _shared(prompt, prefix)
        yield Request(at, prompt, output, (*shared, *(part for part in ends if part[1] > prefix)))


def _lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path, _LONGEST_LINE), 1):
        if number > _MOST_REQUESTS + 1:
            raise SourceError(f"{path} has more than {_MOST_REQUESTS:,} requests, which are the most that are followed")
        yield line


def _rows(path: Path, lines: Iterable[str], prefix: int) -> Iterator[Request]:
    rows = csv.reader(lines)
    header = [name.strip().lower() for name in next(rows, [])]
    places = {}
    for wanted, names in _COLUMNS.items():
        name = next((name for name in names if name in header), None)
        if name is None and wanted not in _OPTIONAL:
            raise SourceError(f"{path}, line 1: no column {wanted!r}; the file needs timestamp,prompt,output")
        if name is not None and header.count(name) > 1:
            raise SourceError(f"{path}, line 1: {header.count(name)} columns {name!r}; leave one of them")
        if name is not None:
            places[wanted] = header.index(name)
    if len(missing := [name for name in _OPTIONAL if name not in places]) == 1:
        raise SourceError(f"{path}, line 1: no column {missing[0]!r}; prefix and prefix_tokens belong together")
    for number, row in enumerate(rows, 2):
        if row:
            try:
                values = {name: row[place].strip() for name, place in places.items()}
                prompt, named = _tokens(values["prompt"]), values.get("prefix", "")
                tokens = _tokens(values["prefix_tokens"]) if named else 0
                shared = _shared(prompt, prefix, named, tokens)
                yield Request(_instant(values["timestamp"]), prompt, _tokens(values["output"]), shared)
            except (ValueError, IndexError, OverflowError):
                raise SourceError(
                    f"{path}, line {number}: {shown(','.join(row))}; accepted: a time, and tokens of the prompt and of "
                    f"the answer{' (of the prefix where it has a name)' * bool(_OPTIONAL & places.keys())} from 1 to "
                    f"{_MOST_TOKENS}"
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
