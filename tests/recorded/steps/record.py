"""Record whole runs on a CUDA build: one process a run, the loop of :func:`tests.recorded.steps.runs.step_of`.

A run is the name of a recording that is there, or is written as its recording will be named, with spaces:
``"mlp 64 adam fp32"``, ``"gpt2 4 adamw amp 4 accum=2 clip=1.0"``: model, batch, optimizer, ``fp32``, ``bf16``, ``amp``
or ``ampfp16``, iterations (3) and options (:data:`tests.recorded.steps.runs.OPTIONS`; ``conf=`` the allocator's
configuration, ``cc=`` the card's compute capability).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.recorded import stub, true_values
from tests.recorded.steps import runs

_ITERATIONS = 3
#: transformers asks whether a mask hides anything: recorded with read-backs that are true.
_LOOKS_AT_MASKS = "hf:"
_MOST_EVENTS = 2_000_000
_MARKS = (
    *("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current"),
    *("active_bytes.all.current", "requested_bytes.all.current", "allocation.all.allocated"),
)
_FIGURES = {
    "allocated_peak": "allocated_bytes.all.peak",
    "reserved_peak": "reserved_bytes.all.peak",
    "active_peak": "active_bytes.all.peak",
    "requested_peak": "requested_bytes.all.peak",
    "n_alloc": "allocation.all.allocated",
}


def record(names: list[str], folder: Path, extra: Mapping[str, str]) -> int:
    """Record the runs, one process on the stub each; without names all that ``folder`` has. The exit status."""
    status = 0
    for name in names or runs.names(folder=folder):
        run = _asked(name, folder)
        environment = dict(extra) | {"FAKE_CUDA_CC": str(run.capability)}
        if run.capability != 90:
            environment.pop("FAKE_CUDNN_DEVPROP", None)  # the description of another card: made from the stub's own
        if run.model.startswith(_LOOKS_AT_MASKS):
            environment.setdefault("GRAPHMEM_TRUE_VALUES", os.environ.get("GRAPHMEM_TRUE_VALUES") or os.devnull)
            environment["FAKE_CUDA_SENT"] = "1"
        if run.alloc_conf:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = run.alloc_conf  # the name that every version reads
        asked = json.dumps(asdict(replace(run, marks=(), changes=())))  # what a command line can hold
        failed = stub.run(["-m", "tests.recorded.steps.record", asked, str(folder)], environment)
        print(run.name, "FAILED" if failed else "recorded", flush=True)
        status = status or failed
    return status


def _asked(text: str, folder: Path) -> runs.RecordedRun:
    """The run of that recording, or the one that the words say."""
    if text in runs.names(folder=folder):
        return runs.load(text, folder)
    model, batch, optimizer, dtype, *rest = text.split()
    iterations = int(rest.pop(0)) if rest and "=" not in rest[0] else _ITERATIONS
    options = dict(word.split("=", 1) for word in rest)
    conf, capability = options.pop("conf", ""), int(options.pop("cc", 90))
    if unknown := set(options) - runs.OPTIONS:
        raise ValueError(f"{text}: options {sorted(unknown)} are not understood")
    name = re.sub(r"[^A-Za-z0-9_.=-]", "-", "_".join(text.split()))
    marks, changes = (), ()
    return runs.RecordedRun(
        name, model, int(batch), optimizer, dtype, iterations, options, conf, capability, (0, 0), 0, 0, marks, changes
    )


def _here(run: runs.RecordedRun, folder: Path) -> None:
    """Run it in this process, on a card or the stub, and write what the allocator did."""
    import torch

    torch.manual_seed(0)
    rows: list[list[Any]] = []
    document: dict[str, Any] = {}

    def mark(part: str) -> None:
        if part == runs.DONE:
            document.update(_document(run, rows))
            return
        stats = torch.cuda.memory_stats()
        rows.append([part, *(stats[key] for key in _MARKS)])

    with runs.torch_flags(run.options), true_values.follow():
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
        runs.step_of(run, mark)()
    data = json.dumps(document, separators=(",", ":")).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run.name}{runs.SUFFIX}").write_bytes(gzip.compress(data, 9, mtime=0))


def _document(run: runs.RecordedRun, rows: list[list[Any]]) -> dict[str, Any]:
    import torch

    stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    major, minor = torch.cuda.get_device_capability()
    streams: dict[int, int] = {}
    events = [
        [
            event["action"],
            -1 if event["action"] == "oom" else event["addr"],
            event["size"],
            streams.setdefault(event["stream"], len(streams)),
        ]
        for event in snapshot["device_traces"][0]
    ]
    base = min(address for _, address, _, _ in events if address >= 0)
    return {
        "model": run.model,
        "batch": run.batch,
        "optimizer": run.optimizer,
        "dtype": run.dtype,
        "steps": run.iterations,
        "opts": run.options,
        "alloc_conf": run.alloc_conf,
        "cc": major * 10 + minor,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: stats[key] for name, key in _FIGURES.items()},
        "n_events": len(events),
        "segments": stats["segment.all.current"],
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
        "phys_peak": stub.counter("peak"),
        "launches": stub.counter("launches"),
        "marks": rows,
        "marks_columns": [
            *("what", "allocated", "allocated_peak_so_far", "reserved", "active", "requested", "allocations_so_far")
        ],
        "trace_columns": ["action", "addr-base", "size", "stream index"],
        "base": base,
        "trace": [[action, address - base, size, stream] for action, address, size, stream in events],
        "snapshot": [_segment(segment, base) for segment in snapshot["segments"]],
    }


def _segment(segment: dict[str, Any], base: int) -> list[Any]:
    blocks = [[block["size"], block["requested_size"], block["state"]] for block in segment["blocks"]]
    start = segment["address"] - base
    return [start, segment["total_size"], segment["segment_type"], int(segment["is_expandable"]), blocks]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    _here(runs.RecordedRun(**asked), Path(sys.argv[2]))
