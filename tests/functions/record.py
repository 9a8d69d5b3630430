"""Record what the cases allocate on a CUDA build of PyTorch: ``python -m tests.functions.record [part of a name ...]``.

Writes ``tests/golden/pytorch/functions/<group>.jsonl.gz``, one case a line: its name and the bytes asked for and given
back (negative), in order. Without names every group is written
anew; with names only the cases that contain one of them, and new ones.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.functions import runner
from tests.functions.cases import CASES, Case

FOLDER = Path(__file__).parent.parent / "golden" / "pytorch" / "functions"
_MOST_EVENTS = 100_000


def record(case: Case) -> dict[str, Any]:
    """The recording of one case. ``error`` instead of ``changes`` where the build cannot run it."""
    changes: list[int] = []
    started = False

    def mark() -> None:
        nonlocal started
        if started:
            for event in torch.cuda.memory._snapshot()["device_traces"][0]:
                if event["action"] in ("alloc", "free_requested"):
                    changes.append(event["size"] if event["action"] == "alloc" else -event["size"])
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
        started = True

    try:
        runner.run(case, mark)
    except Exception as error:
        torch.cuda.memory._record_memory_history(enabled=None)
        return {"case": case.name, "torch": torch.__version__, "error": str(error).strip().splitlines()[0][:200]}
    return {"case": case.name, "torch": torch.__version__, "changes": changes}


def load(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Every recording by name of its case."""
    found = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            document = json.loads(line)
            found[document["case"]] = document
    return found


def main(parts: list[str]) -> None:
    runner.warm_up()
    runner.warm_up()
    documents = load() if parts else {}
    for case in CASES.values():
        if case.name not in documents or any(part in case.name for part in parts):
            documents[case.name] = record(case)
            if "error" in documents[case.name]:
                print(case.name, documents[case.name]["error"])
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(case.group for case in CASES.values()):
        lines = [
            json.dumps(documents[c.name], separators=(",", ":"))
            for c in CASES.values()
            if c.group == name and c.name in documents
        ]
        data = "\n".join(lines).encode() + b"\n"
        (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
