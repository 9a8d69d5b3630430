"""Record the calls of PyTorch's operator database on a CUDA build.

``python -m tests.recorded op_db record [entry ...]`` writes ``op_db/<kind of entry>.jsonl.gz`` in the folder of
recordings: a line a call with its arguments (``sample``) and the bytes asked for and given back (``changes``), or why
it did not run (``error``). Entries run in processes of their own, each started anew where one ends it: some
libraries do that where they find no device.
"""

from __future__ import annotations

import collections
import gzip
import json
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from tests import places
from tests.recorded import stub

FOLDER = places.PYTORCH / "op_db"
#: What was recorded so far; a recording that was interrupted goes on from there.
UNFINISHED = FOLDER / "unfinished.jsonl"
#: Seconds without a line after which a process is taken to hang.
_PATIENCE = 150

Document = dict[str, Any]


def group_of(call: str) -> str:
    """The file that a call is kept in."""
    entry = call.split("/", 1)[0]
    head, dot, _ = entry.partition(".")
    return head if dot and head in ("fft", "linalg", "masked", "nn", "signal", "special") else "others"


def recordings() -> dict[str, Document]:
    """Every recording by name of its call, in the order of the database."""
    found = {}
    for path in sorted(FOLDER.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            document = json.loads(line)
            found[document["case"]] = document
    return found


def write(documents: Iterable[Document]) -> None:
    groups: dict[str, list[Document]] = collections.defaultdict(list)
    for document in documents:
        if "error" in document and "/stretched/" in document["case"]:
            continue  # the operator takes no such shapes
        groups[group_of(document["case"])].append(document)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for group, members in groups.items():
        data = "".join(json.dumps(member, separators=(",", ":")) + "\n" for member in members).encode()
        (FOLDER / f"{group}.jsonl.gz").write_bytes(gzip.compress(data, 9, mtime=0))


def record(names: Sequence[str]) -> None:
    """Record these entries anew, or all."""
    from tests.recorded.op_db.entries import entries

    chosen = list(names) or list(entries())
    kept = {case: doc for case, doc in recordings().items() if case.split("/", 1)[0] not in chosen} if names else {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    UNFINISHED.touch()
    while _unfinished():
        _run_worker(chosen)
    write([*kept.values(), *(line for line in _lines() if "case" in line)])
    UNFINISHED.unlink()


def _run_worker(entries: Sequence[str]) -> None:
    """A process records entries until it has done all, or dies; then its last call has an error."""
    command = [str(stub.python()), "-m", "tests.recorded.op_db.worker", str(UNFINISHED), *entries]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=stub.environment(),
        cwd=places.ROOT,
    )
    size, reason = -1, ""
    while True:
        try:
            _, said = process.communicate(timeout=_PATIENCE)
            break
        except subprocess.TimeoutExpired:
            if UNFINISHED.stat().st_size == size:
                process.kill()
                reason = f"not done within {_PATIENCE} s"
            size = UNFINISHED.stat().st_size
    if process.returncode == 0:
        return
    last = (_lines() or [{}])[-1]
    if "begin" not in last:
        raise SystemExit(f"the recording process ended with {process.returncode}:\n{said[-2000:]}")
    words = [line for line in said.splitlines() if line.strip()]
    reason = reason or f"ends the process ({process.returncode}): {words[-1][:160] if words else 'no message'}"
    print(last["begin"], reason, flush=True)
    with UNFINISHED.open("a") as stream:
        stream.write(json.dumps({"case": last["begin"], "error": reason}) + "\n")


def _lines() -> list[Document]:
    return [json.loads(line) for line in UNFINISHED.read_text().splitlines()]


def _unfinished() -> bool:
    return "end" not in (_lines() or [{}])[-1]
