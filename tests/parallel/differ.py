"""Show where predictions leave the recordings: ``python -m tests.parallel.differ [-v] [part of a name ...]``."""

from __future__ import annotations

import sys

from graphmem.accuracy.align import align
from graphmem.errors import CaptureError
from tests.parallel.recordings import CASES, load, predict


def main(parts: list[str]) -> None:
    verbose = "-v" in parts
    parts = [part for part in parts if part != "-v"]
    recordings = load()
    for name, case in CASES.items():
        if parts and not any(part in name for part in parts):
            continue
        try:
            ours = predict(case)
        except CaptureError as error:
            print(f"{name}: refused{' as meant' if case.refused else ''}: {error}", flush=True)
            continue
        recorded = recordings[name]
        reserved = f"reserved {ours.reserved_bytes:,} for {recorded.reserved_bytes:,}"
        reserved += f", late events {ours.late_bytes:,} for {recorded.late_bytes:,}"
        if ours.events == recorded.events:
            print(f"{name}: equal ({len(ours.events)}); {reserved}", flush=True)
            continue
        keys = {pair: number for number, pair in enumerate(dict.fromkeys(ours.events + recorded.events))}
        match = align([keys[pair] for pair in ours.events], [keys[pair] for pair in recorded.events])
        print(f"{name}: {match.share:.4f} of {len(recorded.events)}; {reserved}")
        for a, b, c, d in match.differences()[: None if verbose else 4]:
            print(f"    at {a}: ours {ours.events[a:b][:12]} recorded {recorded.events[c:d][:12]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
