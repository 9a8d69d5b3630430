"""Where predictions leave recordings, case by case, and how many do."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from graphmem.accuracy.align import align
from graphmem.errors import CaptureError
from tests.recorded.case import named
from tests.recorded.device import peak_bytes

_SHOWN = 3
Events = Sequence[Any]


def show(
    cases: Mapping[str, Any],
    recorded: Mapping[str, Events],
    predict: Callable[[Any], Events],
    parts: list[str],
    verbose: bool = False,
) -> dict[str, int]:
    """Print what differs of the cases whose names contain one of ``parts``; ``verbose``: all of it. The verdicts."""
    counts: collections.Counter[str] = collections.Counter()
    for case in cases.values():
        if named(case, parts):
            verdict, lines = _verdict(case, recorded.get(case.name), predict, verbose)
            counts[verdict] += 1
            if verbose or verdict not in ("equal", "refused as meant"):
                print(*lines, sep="\n", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return dict(counts)


def table(
    cases: Mapping[str, Any],
    recorded: Mapping[str, Events],
    predict: Callable[[Any], Events],
    parts: list[str],
) -> dict[str, int]:
    """Print one line a group: how many of its cases are equal, equal in peak, different, refused."""
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases.values():
        if named(case, parts):
            rows[case.group][_verdict(case, recorded.get(case.name), predict, False)[0]] += 1
    total = sum(rows.values(), collections.Counter())
    for group, counts in [*rows.items(), ("all", total)]:
        print(f"{group:20s} " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), flush=True)
    return dict(total)


def _verdict(
    case: Any, recorded: Events | None, predict: Callable[[Any], Events], verbose: bool
) -> tuple[str, list[str]]:
    start = time.perf_counter()
    try:
        predicted = predict(case)
    except CaptureError as error:
        verdict = "refused as meant" if case.refused else "refused"
        return verdict, [f"{case.name}: {verdict}: {error}"]
    if recorded is None:
        return "no recording", [f"{case.name}: no recording"]
    seconds = time.perf_counter() - start
    if list(predicted) == list(recorded):
        return "equal", [f"{case.name}: equal ({len(predicted)}, {seconds:.1f}s)"]
    ours, theirs = peak_bytes(_bytes(predicted)), peak_bytes(_bytes(recorded))
    verdict = "equal in peak" if ours == theirs else "different"
    numbers = {event: number for number, event in enumerate(dict.fromkeys([*predicted, *recorded]))}
    match = align([numbers[event] for event in predicted], [numbers[event] for event in recorded])
    lines = [f"{case.name}: {verdict}; peak {ours} for {theirs}; {match.share:.4f}, {seconds:.1f}s"]
    for a, b, c, d in match.differences()[: None if verbose else _SHOWN]:
        lines.append(f"    at {a}: ours {list(predicted[a:b][:12])} recorded {list(recorded[c:d][:12])}")
    return verdict, lines


def _bytes(events: Iterable[Any]) -> list[int]:
    """Bytes of events that are bytes alone, or bytes and where."""
    return [event[0] if isinstance(event, tuple) else event for event in events]
