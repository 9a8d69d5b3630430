"""Show where predictions leave the recordings: ``python -m tests.loops.differ [-v] [part of a name ...]``."""

from __future__ import annotations

import collections
import sys
import time

from graphmem.errors import CaptureError
from tests.loops.cases import CASES
from tests.loops.predict import predict
from tests.loops.record import load
from tests.loops.runner import peak_bytes
from tests.steps.align import align


def main(parts: list[str]) -> None:
    verbose = "-v" in parts
    parts = [part for part in parts if part != "-v"]
    counts: collections.Counter[str] = collections.Counter()
    recordings = load()
    for case in CASES.values():
        if parts and not any(part in case.name for part in parts):
            continue
        recorded = recordings.get(case.name, {}).get("changes")
        start = time.time()
        try:
            ours = predict(case)
        except CaptureError as error:
            counts["refused as meant" if case.refused else "refused"] += 1
            print(f"{case.name}: refused{' as meant' if case.refused else ''}: {error}", flush=True)
            continue
        if recorded is None:
            counts["no recording"] += 1
            print(f"{case.name}: no recording: {recordings.get(case.name, {}).get('error')}", flush=True)
            continue
        verdict = "equal" if ours == recorded else "peak" if peak_bytes(ours) == peak_bytes(recorded) else "different"
        counts[verdict] += 1
        took = time.time() - start
        if ours != recorded:
            match = align(ours, recorded)
            peaks = f"peak {peak_bytes(ours)} for {peak_bytes(recorded)}"
            print(f"{case.name}: {verdict}; {peaks}; {match.share:.4f}, {took:.1f}s")
            for a, b, c, d in match.differences()[: None if verbose else 3]:
                print(f"    at {a}: ours {ours[a:b][:12]} recorded {recorded[c:d][:12]}", flush=True)
        elif verbose:
            print(f"{case.name}: equal ({len(ours)}, {took:.1f}s)", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
