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

from graphmem.base.documents import read_lines, shown
from graphmem.errors import SourceError, UsageError
from graphmem.serving.base import Request
from graphmem.serving.lengths import Quantiles, length_at

#: Requests of a load, which take minutes to follow, and bytes of a line of its file: one of Mooncake's has a hash of
#: some ten digits for 512 tokens, so that there is room for a prompt of four million.
_MOST_REQUESTS, _LONGEST_LINE = 1_000_000, 100_000
#: Tokens of a prompt or an answer: more is a slip, and no model has a context of a thousandth of it.
_MOST_TOKENS = 1 << 31
#: Seconds of the part of a longer load by which cards are chosen.
HOUR = 3600.0
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

#: See :class:`graphmem.serving.base.Request`.
Shared = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Load:
    """A load over so many seconds. ``requests`` makes its requests, of which those that are drawn have at most so many
    tokens."""

    seconds: float
    described: str
    requests: Callable[[int], tuple[Request, ...]]


def shorter(prompts: Quantiles, prefix: int) -> float:
    """The part of prompts that are shorter than what they should share, in hundredths."""
    at = length_at(prompts)
    return sum(at(number / 100) < prefix for number in range(1, 100)) / 100


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
        found.append(Request(at, prompt, output, _beginning(prompt, prefix)))
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
    of them, where the file does not say itself how they begin. A CSV file has columns timestamp (seconds, or a date and
    time), prompt and output (tokens); prefix and prefix_tokens where prompts begin alike. JSON lines are Mooncake's:
    timestamp (ms), input_length, output_length, hash_ids (each of 512 tokens). Raises :class:`SourceError` naming the
    line."""
    try:
        lines = _lines(path)
        first = next(lines, "")
        rows = _json_lines if first.lstrip().startswith("{") else _rows
        found = list(rows(path, chain([first], lines)))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    except csv.Error as error:
        raise SourceError(f"{path} is no CSV file: {error}") from None
    if not found:
        raise SourceError(f"{path} has no requests")
    if prefix and any(request.shared for request in found):
        raise UsageError(f"{path} says itself how its prompts begin: leave out --shared-prefix {prefix}")
    found.sort(key=lambda request: request.arrival)
    start = found[0].arrival
    return tuple(
        replace(one, arrival=one.arrival - start, shared=one.shared or _beginning(one.prompt, prefix)) for one in found
    )


def _beginning(prompt: int, prefix: int) -> Shared:
    """The ``prefix`` that all prompts begin with, as far as this one goes."""
    return (("", min(prefix, prompt)),) if prefix else ()


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[Request]:
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
        yield Request(at, prompt, output, tuple(ends))


def _lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path, _LONGEST_LINE), 1):
        if number > _MOST_REQUESTS + 1:
            raise SourceError(f"{path} has more than {_MOST_REQUESTS:,} requests, which are the most that are followed")
        yield line


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Request]:
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
                shared = ((named, min(tokens, prompt)),) if named else ()
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
