"""Measuring cases on this machine, each in a fresh process; within a time budget, and resumable.

PyTorch runs on the machine's card, ONNX Runtime on its CPU.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphmem.accuracy.case import Case
from graphmem.accuracy.kept import read
from graphmem.accuracy.record import FAILED, SCHEMA, Machine, Record, append, read_records, record_from
from graphmem.errors import UsageError

#: runtime -> the measuring program
_CHILDREN = {"pytorch": "graphmem.accuracy.child", "onnxruntime": "graphmem.accuracy.onnxruntime.child"}

#: Longest time one case may take, in seconds: building a large model on the host included.
CASE_SECONDS = 900.0


@dataclass(frozen=True)
class Plan:
    """How to measure. ``python`` is the interpreter of the measuring processes; ``budget_seconds`` None has no end;
    ``cap`` maps a case to the limit on its reserved bytes, or is None for no limit; traces go to ``traces``, and ONNX
    graphs without their weights to ``graphs``, where later predictions find them."""

    output: Path | None = None
    budget_seconds: float | None = None
    case_seconds: float = CASE_SECONDS
    traces: Path | None = None
    graphs: Path | None = None
    cap: Callable[[Case], int | None] | None = None
    python: str = sys.executable
    environment: Mapping[str, str] | None = None


def machine_here(plan: Plan) -> Machine:
    """The card that the measuring processes will find. Raises :class:`UsageError` where there is none."""
    return read(Machine, ask({"case": None}, plan)["machine"])


def ask(request: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The answer of a fresh process on the card to a request without a case. Raises :class:`UsageError`."""
    answer = _in_fresh_process(request, plan, plan.case_seconds)
    if answer["status"] == FAILED:
        raise UsageError(f"no CUDA GPU to measure on; predictions need none ({answer['error']})")
    return answer


def measure(cases: Sequence[Case], plan: Plan) -> Iterator[Record]:
    """Measure the cases that the output file does not hold yet, and add each record to it.

    Stops before a case when the budget is used up. A record is yielded as soon as it is written.
    """
    known = {(_identity(record.case), record.cap_bytes is not None) for record in _earlier(plan.output)}
    begun = time.monotonic()
    for case in cases:
        if (_identity(case), plan.cap is not None) in known:
            continue
        left = None if plan.budget_seconds is None else plan.budget_seconds - (time.monotonic() - begun)
        if left is not None and left <= 0:
            return
        record = measure_one(case, plan, min(plan.case_seconds, left or plan.case_seconds))
        if plan.output is not None:
            append(plan.output, [record])
        yield record


def measure_one(case: Case, plan: Plan, limit_seconds: float = CASE_SECONDS) -> Record:
    """Measure one case in a fresh process. Whatever goes wrong there becomes the record's error."""
    cap = plan.cap(case) if plan.cap is not None else None
    trace = _trace_path(plan.traces, case)
    request = {"case": case.to_json(), "cap_bytes": cap, "trace": str(trace) if trace else None}
    begun = time.monotonic()
    answer = _in_fresh_process(request, plan, limit_seconds)
    record = record_from({"schema": SCHEMA, "case": case.to_json(), **answer})
    return replace(
        record,
        case=_with_kept_graph(case, plan),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        seconds=round(time.monotonic() - begun, 1),
        cap_bytes=cap,
        trace=trace.name if trace is not None and trace.exists() else "",
    )


def _identity(case: Case) -> Case:
    """The case, an ONNX file being known by its name: records may name the kept graph instead."""
    return replace(case, model=Path(case.model).name) if case.model.endswith(".onnx") else case


def _with_kept_graph(case: Case, plan: Plan) -> Case:
    """The case with its graph in the folder for them, named as seen from the file of records."""
    if plan.graphs is None or not case.model.endswith(".onnx"):
        return case
    from graphmem.accuracy.onnxruntime.graph import keep_graph

    kept = keep_graph(Path(case.model), plan.graphs)
    return replace(case, model=Path(os.path.relpath(kept, plan.output.parent if plan.output else ".")).as_posix())


def _in_fresh_process(request: Mapping[str, Any], plan: Plan, limit_seconds: float) -> dict[str, Any]:
    case = request["case"] or {}
    runtime = case.get("runtime", "pytorch")
    try:
        done = subprocess.run(
            [plan.python, "-m", _CHILDREN[runtime]],
            input=json.dumps(request),
            env=_environment(plan, case.get("alloc_conf", "") if runtime == "pytorch" else ""),
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": FAILED, "error": f"took longer than {limit_seconds:.0f} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"status"')]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"status": FAILED, "error": f"exit code {done.returncode}: {last[:300]}"}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def _environment(plan: Plan, alloc_conf: str) -> dict[str, str]:
    """The caller's, with the allocator's configuration of the case and nothing of another's."""
    environment = {**os.environ, **(plan.environment or {})}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    if alloc_conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = alloc_conf  # every version reads it
    return environment


def _earlier(path: Path | None) -> list[Record]:
    """The records already there, but for those that failed: they are tried again."""
    if path is None or not path.exists():
        return []
    return [record for record in read_records(path) if record.status != FAILED]


def _trace_path(folder: Path | None, case: Case) -> Path | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{case.name}.trace.json.gz"
