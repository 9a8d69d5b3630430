"""Record what cases allocate on a CUDA build of PyTorch, and keep it: one file a group, one case a line.

A line has the case's name, the version of torch, and ``changes``: the bytes asked for and given back (negative), in
order; ``error`` instead where the build cannot run it.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests import places
from tests.recorded.case import Case, Documents, Runner, named
from tests.recorded.device import warm_up

_MOST_EVENTS = 1_000_000
#: Cases after which everything is written, in case the build crashes.
_WRITE_EVERY = 10


def record_changes(run: Callable[[Callable[[], None]], None]) -> dict[str, Any]:
    """What ``run`` does to memory between its two calls of the function it gets: ``changes``, or an ``error``."""
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
        run(mark)
    except Exception as error:
        torch.cuda.memory._record_memory_history(enabled=None)
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:200]}
    return {"changes": changes}


def record(case: Case, run: Runner) -> dict[str, Any]:
    """The recording of one case; ``run`` calls its second argument before and after what is recorded."""
    from tests.recorded import true_values

    with true_values.follow(os.devnull) if getattr(case, "true_values", False) else contextlib.nullcontext():
        return {"case": case.name, "torch": torch.__version__} | record_changes(lambda mark: run(case, mark))


def load(folder: Path) -> Documents:
    """Every recording by name of its case."""
    found = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            if line:
                document = json.loads(line)
                found[document["case"]] = document
    return found


def record_all(folder: Path, cases: Mapping[str, Any], run: Runner, parts: list[str]) -> None:
    """Record every case anew, or, given ``parts`` of names, those that contain one."""
    _refuse_another_version()
    _record(folder, cases, run, parts, lambda case: case.group)


def record_version(cases: Mapping[str, Any], run: Runner, parts: list[str]) -> None:
    """The same for a version of which not every kind is recorded: all groups in one file of its folder."""
    running = places.installed_torch()
    if running is None or running in places.WHOLE:
        raise SystemExit(f"every kind is recorded of torch {torch.__version__}: record functions, not versions")
    _record(places.of_torch(running), cases, run, parts, lambda _: "functions")


def _record(
    folder: Path, cases: Mapping[str, Any], run: Runner, parts: list[str], file_of: Callable[[Case], str]
) -> None:
    launch_no_triton()
    warm_up()
    warm_up()
    documents = load(folder) if parts else {}
    for count, case in enumerate(cases.values()):
        if named(case, parts):
            documents[case.name] = record(case, run)
            print(case.name, len(documents[case.name].get("changes", ())), flush=True)
            if "error" in documents[case.name]:
                print(case.name, documents[case.name]["error"], flush=True)
            if count % _WRITE_EVERY == 0:
                _write(folder, cases, documents, file_of)
    _write(folder, cases, documents, file_of)


def _refuse_another_version() -> None:
    """A newer PyTorch than the recorded ones must not write over their files."""
    recorded = ".".join(map(str, places.PYTORCH_VERSION))
    if places.installed_torch() != places.PYTORCH_VERSION:
        raise SystemExit(
            f"torch {torch.__version__} would write over the recordings of {recorded}: copy {places.PYTORCH} to a "
            "folder of its own version first, then record everything in it anew"
        )


def launch_no_triton() -> None:
    """Outer products run on a Triton kernel, which takes no memory, and which a pretended driver could not compile."""
    package = "torch._native.ops.bmm_outer_product"
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch._native") is None:
        return
    if importlib.util.find_spec(package) is None:  # 2.12
        return
    kernels: Any = importlib.import_module(f"{package}.triton_kernels")
    kernels._bmm_outer_product_kernel = collections.defaultdict(lambda: lambda *_, **__: None)


def _write(folder: Path, cases: Mapping[str, Case], documents: Documents, file_of: Callable[[Case], str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(file_of(case) for case in cases.values()):
        chosen = [documents[c.name] for c in cases.values() if file_of(c) == name and c.name in documents]
        data = "\n".join(json.dumps(document, separators=(",", ":")) for document in chosen).encode() + b"\n"
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(data, 9, mtime=0))
