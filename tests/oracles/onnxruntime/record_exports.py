"""Record the arena of real CPU sessions of exported models, and keep the graphs they executed.

    python -m tests.oracles.onnxruntime.record_exports DIRECTORY

DIRECTORY holds what ``export_models`` wrote. Writes ``tests/golden/onnxruntime/exports.json.gz`` and ``executed/``.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from graphmem.sources.onnx_file import read_onnx
from tests.oracles.onnxruntime.export_models import MODELS
from tests.oracles.onnxruntime.record_session import record
from tests.support.onnx_sessions import EXECUTED, keep

LEVELS = ("disabled", "basic", "all")
#: Batches of the runs of each session: three of one size, and several sizes in turn.
SESSIONS = ((1, 1, 1), (3, 3, 3), (16, 16, 16), (1, 3, 3, 16, 16, 1))
KEPT = ("TotalAllocated", "InUse", "MaxInUse", "NumAllocs", "NumArenaExtensions")


def recorded(path: Path, level: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """The statistics after loading and after each run, the outputs given back."""
    declared = read_onnx(path).declared
    runs = [{s.name: [b if isinstance(d, str) else d for d in s.shape] for s in declared} for b in batches]
    result = record({"model": str(path), "runs": runs, "level": level})
    if "error" in result:
        raise SystemExit(f"{path.name} {level} {batches}: {result['error']}")
    tags = ["init", *(f"run{number}_released" for number in range(1, len(batches) + 1))]
    stats = [{key: result["stats"][tag][key] for key in KEPT} for tag in tags]
    return {"model": path.stem, "level": level, "batches": batches, "version": result["version"], "stats": stats}


def main() -> None:
    directory = Path(sys.argv[1])
    cases = []
    for name in MODELS:
        for level in LEVELS:
            keep(directory / f"{name}.onnx", level, name)
            cases += [recorded(directory / f"{name}.onnx", level, batches) for batches in SESSIONS]
            print(name, level, flush=True)
    data = json.dumps({"cases": cases}, separators=(",", ":")).encode()
    (EXECUTED.parent / "exports.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main()
