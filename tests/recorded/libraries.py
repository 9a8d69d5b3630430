"""Whole programs of libraries (:mod:`tests.recorded.cases.libraries`): run, recorded, predicted and compared.

Each runs in a process of its own, on the stub with a cuDNN that plans for real, small values followed
(:mod:`tests.recorded.true_values`). ``table --cudnn-library PATH`` asks that cuDNN, as ``--cudnn`` does.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import places
from tests.recorded import stub
from tests.recorded.cases.libraries import CASES, Case

FOLDER = places.PYTORCH / "libraries"
SUFFIX = ".json.gz"
_MOST_EVENTS = 4_000_000


@dataclass(frozen=True)
class Libraries:
    """The kind. Programs are named in full or in part; without a name all are meant whose libraries are installed."""

    folder: Path

    def record(self, arguments: list[str]) -> int:
        status = 0
        for program in _chosen(arguments):
            # A list in place of those of an environment variable: values are always followed here.
            with tempfile.NamedTemporaryFile(suffix=".json") as report:
                environment = stub.REAL_CUDNN | {
                    "GRAPHMEM_TRUE_VALUES": os.environ.get("GRAPHMEM_TRUE_VALUES") or report.name,
                    "FAKE_CUDA_SENT": "1",
                    "TRUE_VALUES_SELECT": "all",
                }
                failed = stub.run(["-m", "tests.recorded.libraries", program.name, str(self.folder)], environment)
            print(program.name, "FAILED" if failed else "recorded", flush=True)
            status = status or failed
        return status

    def table(self, arguments: list[str]) -> int:
        options, parts = _options(arguments)
        print(f"{'program':36s} {'allocated':>15s} {'recorded':>15s} {'reserved':>15s} {'recorded':>15s}  matched    s")
        for program in _chosen(parts, self.folder):
            start = time.perf_counter()
            try:
                compared = compare(program, self.folder, options.cudnn_library)
            except Exception as error:
                print(f"{program.name:36s} {type(error).__name__}: {str(error)[:600]}", flush=True)
                continue
            replay, recorded = compared.predicted.replay, compared.recorded
            columns = [
                f"{replay.peak_allocated_bytes:15,} {_beside(compared.allocated_error, recorded.peak_allocated_bytes)}",
                f"{replay.peak_reserved_bytes:15,} {_beside(compared.reserved_error, recorded.peak_reserved_bytes)}",
            ]
            took = time.perf_counter() - start
            print(f"{program.name:36s} {' '.join(columns)}   {compared.match.share:.4f} {took:5.0f}", flush=True)
        return 0

    def differ(self, arguments: list[str]) -> int:
        from tests.recorded.steps.differ import report

        options, parts = _options(arguments)
        for program in _chosen(parts, self.folder):
            compared = compare(program, self.folder, options.cudnn_library)
            for line in report(compared, options.frees, options.number):
                print(line)
        return 0


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded libraries")
    parser.add_argument("parts", nargs="*", metavar="PART", help="programs whose names contain one of these")
    parser.add_argument("--cudnn-library", metavar="PATH", help="ask this cuDNN for workspaces, as ``--cudnn`` does")
    parser.add_argument("--frees", action="store_true", help="compare frees too (differ)")
    parser.add_argument("-n", "--number", type=int, default=10, help="differences to show")
    options = parser.parse_args(arguments)
    return options, options.parts


def _chosen(parts: Sequence[str], recorded_in: Path | None = None) -> list[Case]:
    found = [program for name, program in CASES.items() if not parts or any(part in name for part in parts)]
    if recorded_in is not None:
        found = [program for program in found if (recorded_in / f"{program.name}{SUFFIX}").exists()]
    return [program for program in found if parts or missing(program) is None]


def missing(program: Case) -> str | None:
    """The first of a program's packages that is not installed."""
    return next((name for name in program.needs if importlib.util.find_spec(name) is None), None)


def _beside(error: float, recorded: int) -> str:
    return f"{recorded:15,}" if not error else f"{recorded:15,} {error:+.3%}"


def load(name: str, folder: Path = FOLDER) -> Any:
    """A recording as a :class:`tests.recorded.steps.runs.RecordedRun`, with nothing said of its loop."""
    from graphmem.versions import version_named
    from tests.recorded.steps.runs import RecordedRun

    document = json.loads(gzip.decompress((folder / f"{name}{SUFFIX}").read_bytes()))
    return RecordedRun(
        name, name, 0, "", "", 0, {}, "", 90, version_named(document["torch"]),
        document["allocated_peak"], document["reserved_peak"], (), tuple(document["changes"]),
    )  # fmt: skip


def versions(name: str, folder: Path = FOLDER) -> dict[str, str]:
    """The packages that a program was recorded with, and their versions."""
    document = json.loads(gzip.decompress((folder / f"{name}{SUFFIX}").read_bytes()))
    return {str(package): str(version) for package, version in document["libraries"].items()}


def predict(program: Case, torch_version: tuple[int, int], library: str | None = None) -> Any:
    """Capture a program and replay it on an empty card: a :class:`tests.recorded.steps.runs.PredictedRun`."""
    import contextlib

    from graphmem.accuracy.divergence import changes_of
    from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
    from graphmem.capture.session.session import capture
    from graphmem.cudnn.library import Cudnn
    from graphmem.replay import replay
    from tests.recorded.device import CARD
    from tests.recorded.steps import runs

    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        captured = capture(
            lambda session: program.program(),
            source=program.name,
            device=CARD,
            torch_version=torch_version,
            data_dependent=1.0,
            cudnn=stack.enter_context(Cudnn(library, runs._card(CARD))) if library else None,
        )
    for words, count in captured.assumed.items():
        print(f"    assumed {count}: {words}", file=sys.stderr)
    replayed = replay(captured.trace, PyTorchCachingAllocator(torch_version=torch_version))
    changes = changes_of(captured.trace)
    return runs.PredictedRun(captured.trace, replayed, changes.sizes, changes.events, time.perf_counter() - start)


def compare(program: Case, folder: Path = FOLDER, library: str | None = None) -> Any:
    from graphmem.accuracy.align import align
    from tests.recorded.steps.runs import Comparison

    recorded = load(program.name, folder)
    predicted = predict(program, recorded.torch_version, library)
    ours, theirs = ([size for size in run.changes if size > 0] for run in (predicted, recorded))
    return Comparison(recorded, predicted, align(ours, theirs))


def _here(program: Case, folder: Path) -> None:
    """Run it in this process, on a card or the stub, and write what the allocator did."""
    import torch

    from tests.recorded import true_values
    from tests.recorded.record import launch_no_triton

    launch_no_triton()
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
    report = os.environ["GRAPHMEM_TRUE_VALUES"]
    with true_values.follow(report):
        held = program.program()
    stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    signs = {"alloc": 1, "free_requested": -1}
    read = json.loads(Path(report).read_text(encoding="utf-8"))
    document = {
        "program": program.name,
        "torch": torch.__version__,
        "libraries": {name: importlib.metadata.version(name) for name in program.needs},
        "unknown_values": read["untrue"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "changes": [
            signs[event["action"]] * event["size"] for event in snapshot["device_traces"][0] if event["action"] in signs
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(document, separators=(",", ":")).encode()
    (folder / f"{program.name}{SUFFIX}").write_bytes(gzip.compress(data, 9, mtime=0))
    del held
    print(
        f"{stats['allocated_bytes.all.peak']:,} {stats['reserved_bytes.all.peak']:,} {len(document['changes'])} changes"
    )
    for where, count in list(document["unknown_values"].items())[:20]:
        print(f"    unknown {count} {where}")


KIND = Libraries(FOLDER)

if __name__ == "__main__":
    _here(CASES[sys.argv[1]], Path(sys.argv[2]))
