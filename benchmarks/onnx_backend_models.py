"""Analyse every model of the onnx package's backend tests, and count: analysed, refused with one line, or crashed.

    python benchmarks/onnx_backend_models.py [--refused] [PREFIX]

The models of ``onnx/backend/test/data`` and the node cases that onnx makes in memory; first dimensions that are free
are bound to 2. ``--refused`` lists the reasons.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx.backend.test

from graphmem import analyze
from graphmem.errors import GraphmemError

DATA = Path(next(iter(onnx.backend.test.__path__))) / "data"


def models() -> Iterator[tuple[str, bytes]]:
    """(name, file contents) of every model."""
    for path in sorted(DATA.rglob("*.onnx")):
        yield str(path.relative_to(DATA)), path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    for case in cases:
        if case.model is not None:
            yield f"case/{case.name}", case.model.SerializeToString()


def outcome(path: Path) -> tuple[str, str]:
    """(analysed, refused or crashed; why)."""
    try:
        analyze(path, batch=2)
    except GraphmemError as error:
        if "bind" in str(error) or "--batch" in str(error):  # the batch is fixed, or there is none
            return _without_batch(path)
        return _refusal(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return "analysed", ""


def _without_batch(path: Path) -> tuple[str, str]:
    try:
        analyze(path)
    except GraphmemError as error:
        return _refusal(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return "analysed", ""


def _refusal(error: GraphmemError) -> tuple[str, str]:
    text = str(error)
    return ("refused", text) if text and text.isprintable() else ("crashed", f"not one line: {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("prefix", nargs="?", default="")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        for name, data in models():
            if not name.startswith(arguments.prefix):
                continue
            path.write_bytes(data)
            kind, why = outcome(path)
            counts[kind] += 1
            reasons[re.sub(r"'[^']*'", "'...'", why)[:110]] += kind == "refused"
            if kind == "crashed":
                print(name, why[:300])
    print(dict(counts), f"{time.perf_counter() - begin:.0f} s")
    if arguments.refused:
        for why, count in reasons.most_common():
            if count:
                print(f"{count:5d}  {why}")


if __name__ == "__main__":
    main()
