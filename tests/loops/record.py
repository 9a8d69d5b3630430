"""Record what the loops allocate on a CUDA build of PyTorch: ``python -m tests.loops.record [part of a name ...]``.

Writes ``tests/golden/pytorch/loops/<group>.jsonl.gz``, one loop a line: its name and the bytes asked for and given back
(negative), in order, and the most bytes of pinned host memory. Without names every group is written anew; with names
only the loops that contain one of them.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.loops import runner
from tests.loops.cases import CASES, Case

FOLDER = Path(__file__).parent.parent / "golden" / "pytorch" / "loops"
_MOST_EVENTS = 1_000_000


def record(case: Case) -> dict[str, Any]:
    """The recording of one loop. ``error`` instead of ``changes`` where the build cannot run it."""
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

    document = {"case": case.name, "torch": torch.__version__}
    try:
        runner.run(case, mark)
    except Exception as error:
        torch.cuda.memory._record_memory_history(enabled=None)
        return document | {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:200]}
    return document | {"changes": changes}


def load(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Every recording by name of its loop."""
    found = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            if not line:
                continue
            document = json.loads(line)
            found[document["case"]] = document
    return found


def main(parts: list[str]) -> None:
    runner.warm_up()
    runner.warm_up()
    documents = load() if parts else {}
    for case in CASES.values():
        if not case.refused and (not parts or any(part in case.name for part in parts)):
            start = time.time()
            documents[case.name] = record(case)
            print(case.name, len(documents[case.name].get("changes", ())), round(time.time() - start, 1), flush=True)
            if len(documents) % 10 == 0:
                write(documents)
            if "error" in documents[case.name]:
                print(case.name, documents[case.name]["error"], flush=True)
    write(documents)


def write(documents: dict[str, dict[str, Any]]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(case.group for case in CASES.values()):
        chosen = [documents[c.name] for c in CASES.values() if c.group == name and c.name in documents]
        data = "\n".join(json.dumps(document, separators=(",", ":")) for document in chosen).encode() + b"\n"
        (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
