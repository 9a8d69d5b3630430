"""Show where predictions leave the recordings: ``python -m tests.functions.differ [-v] [part of a name ...]``."""

from __future__ import annotations

import collections
import gc
import sys
from difflib import SequenceMatcher

from graphmem.errors import CaptureError
from tests.functions.cases import CASES
from tests.functions.predict import predict
from tests.functions.record import load
from tests.functions.runner import peak_bytes


def main(parts: list[str]) -> None:
    verbose = "-v" in parts
    parts = [part for part in parts if part != "-v"]
    counts: collections.Counter[str] = collections.Counter()
    recordings = load()
    gc.freeze()
    for case in CASES.values():
        if parts and not any(part in case.name for part in parts):
            continue
        recorded = recordings[case.name].get("changes")
        try:
            ours = predict(case)
        except CaptureError as error:
            counts["refused as meant" if case.refused else "refused"] += 1
            if not case.refused or verbose:
                print(f"{case.name}: refused: {error}")
            continue
        if recorded is None:
            counts["no recording"] += 1
            continue
        wanted = recorded
        verdict = "equal" if ours == wanted else "peak equal" if peak_bytes(ours) == peak_bytes(wanted) else "different"
        counts[verdict] += 1
        if ours != wanted:
            print(f"{case.name}: {verdict}; peak {peak_bytes(ours)} for {peak_bytes(wanted)}")
            for tag, a, b, c, d in SequenceMatcher(None, ours, wanted, autojunk=False).get_opcodes():
                if verbose or tag != "equal":
                    print(f"    {tag} at {a}: ours {ours[a:b]} recorded {wanted[c:d]}")
        elif verbose:
            print(f"{case.name}: equal {ours}")
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
