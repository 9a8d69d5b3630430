"""Show where predictions leave the recordings."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

from graphmem.accuracy.align import align
from graphmem.errors import CaptureError
from tests.recorded.device import peak_bytes
from tests.recorded.recording import Case, Documents

_SHOWN = 3


def show(
    cases: Mapping[str, Case], recordings: Documents, predict: Callable[[Any], list[int]], arguments: list[str]
) -> None:
    """Print what differs of the cases whose names contain one of the arguments; ``-v``: all of it."""
    verbose = "-v" in arguments
    parts = [part for part in arguments if part != "-v"]
    counts: collections.Counter[str] = collections.Counter()
    for case in cases.values():
        if parts and not any(part in case.name for part in parts):
            continue
        recording = recordings.get(case.name, {})
        start = time.time()
        try:
            predicted = predict(case)
        except CaptureError as error:
            verdict = "refused as meant" if case.refused else "refused"
            if not case.refused or verbose:
                print(f"{case.name}: {verdict}: {error}", flush=True)
        else:
            if "changes" in recording:
                verdict = _compare(case.name, predicted, recording["changes"], time.time() - start, verbose)
            else:
                verdict = "no recording"
                print(f"{case.name}: no recording: {recording.get('error')}", flush=True)
        counts[verdict] += 1
    print(dict(counts))


def _compare(name: str, predicted: list[int], recorded: list[int], seconds: float, verbose: bool) -> str:
    if predicted == recorded:
        if verbose:
            print(f"{name}: equal ({len(predicted)}, {seconds:.1f}s)", flush=True)
        return "equal"
    ours, theirs = peak_bytes(predicted), peak_bytes(recorded)
    verdict = "peak equal" if ours == theirs else "different"
    match = align(predicted, recorded)
    print(f"{name}: {verdict}; peak {ours} for {theirs}; {match.share:.4f}, {seconds:.1f}s")
    for a, b, c, d in match.differences()[: None if verbose else _SHOWN]:
        print(f"    at {a}: ours {predicted[a:b][:12]} recorded {recorded[c:d][:12]}", flush=True)
    return verdict
