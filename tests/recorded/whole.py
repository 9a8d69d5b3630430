"""Whole programs as a kind: run on the stub with a cuDNN that plans for real, recorded, predicted and compared.

Each runs in a process of its own, small values followed (:mod:`tests.recorded.true_values`); a mask of which nothing
is known selects everything, as a prediction assumes. ``table --cudnn-library PATH`` asks that cuDNN, as ``--cudnn``
does; ``--both`` also predicts without it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests import places
from tests.recorded import stub

if TYPE_CHECKING:
    from graphmem.run import Run
    from tests.recorded.steps.runs import Comparison, PredictedRun, RecordedRun

SUFFIX = ".json.gz"
#: The card that the recording's cuDNN is told of, and that programs are predicted for.
CARD = "H200-141GB"
_MOST_EVENTS = 4_000_000
#: The environment variable that names a folder in which captures are kept.
KEPT = "GRAPHMEM_CAPTURES"


class WholeProgram(Protocol):
    """One program."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """The packages that it imports beside torch."""

    def run(self) -> Any:
        """Run it in this process, on a card or the stub; what it returns lives until the peaks are read."""

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        """Its capture; ``library``: the cuDNN to ask."""


@dataclass(frozen=True)
class CaseProgram:
    """A case as a whole program: what it returns is what a script would still hold at its end."""

    case: Any

    @property
    def name(self) -> str:
        return str(self.case.name)

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.case.needs)

    @property
    def compiles(self) -> bool:
        return bool(getattr(self.case, "compiles", False))

    def run(self) -> Any:
        return self.case.program()


@dataclass(frozen=True)
class WholePrograms:
    """A kind of them. Programs are named in full or in part; without a name all are meant whose packages are
    installed. ``kind`` is its name in :mod:`tests.recorded.kinds`; ``cases`` finds its programs."""

    kind: str
    folder: Path
    cases: Callable[[], Mapping[str, WholeProgram]]

    # --- a kind ---

    def record(self, arguments: list[str]) -> int:
        status = 0
        for program in self._chosen(arguments):
            failed = self._record(program)
            print(program.name, "FAILED" if failed else "recorded", flush=True)
            status = status or failed
        return status

    def _record(self, program: WholeProgram) -> int:
        """The exit status. What compiles is recorded in its second run: in the first one, Inductor times its kernels on
        the card, and keeps on the disk which was the fastest."""
        # A list in place of those of an environment variable: values are always followed here.
        with tempfile.NamedTemporaryFile(suffix=".json") as report, tempfile.TemporaryDirectory() as caches:
            environment = stub.REAL_CUDNN | {
                "GRAPHMEM_TRUE_VALUES": os.environ.get("GRAPHMEM_TRUE_VALUES") or report.name,
                "FAKE_CUDA_SENT": "1",
                "TRUE_VALUES_SELECT": "all",
                "TORCHINDUCTOR_CACHE_DIR": caches,
                "TRITON_CACHE_DIR": caches,
            }
            command = ["-m", "tests.recorded.whole", self.kind, program.name, str(self.folder)]
            status = 0
            for _ in range(2 if getattr(program, "compiles", False) else 1):
                status = status or stub.run(command, environment)
        return status

    def table(self, arguments: list[str]) -> int:
        options, parts = _options(self.kind, arguments)
        print(f"{'program':36s} {'allocated':>15s} {'recorded':>15s} {'reserved':>15s} {'recorded':>15s}  matched    s")
        for program in self._chosen(parts, recorded=True):
            for library in (options.cudnn_library, None) if options.both else (options.cudnn_library,):
                start = time.perf_counter()
                label = f"{program.name}{' (trees)' if options.both and library is None else ''}"
                try:
                    compared = self.compare(program, library)
                except Exception as error:
                    print(f"{label:36s} {type(error).__name__}: {str(error)[:600]}", flush=True)
                    continue
                replay, recorded = compared.predicted.replay, compared.recorded
                columns = [
                    f"{said:15,} {_beside(error, truth)}"
                    for said, error, truth in (
                        (replay.peak_allocated_bytes, compared.allocated_error, recorded.peak_allocated_bytes),
                        (replay.peak_reserved_bytes, compared.reserved_error, recorded.peak_reserved_bytes),
                    )
                ]
                took = time.perf_counter() - start
                print(f"{label:36s} {' '.join(columns)}   {compared.match.share:.4f} {took:5.0f}", flush=True)
        return 0

    def differ(self, arguments: list[str]) -> int:
        from tests.recorded.steps.differ import report

        options, parts = _options(self.kind, arguments)
        for program in self._chosen(parts, recorded=True):
            compared = self.compare(program, options.cudnn_library)
            for line in report(compared, options.frees, options.number):
                print(line)
        return 0

    # --- its recordings ---

    def recorded(self) -> list[str]:
        """Names of the programs that are recorded."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))

    def load(self, name: str) -> RecordedRun:
        """A recording, with nothing said of its loop."""
        from graphmem.base.versions import version_named
        from tests.recorded.steps.runs import RecordedRun

        document = self._document(name)
        return RecordedRun(
            name, name, 0, "", "", 0, {}, "", 90, version_named(document["torch"]),
            document["allocated_peak"], document["reserved_peak"], (), tuple(document["changes"]),
        )  # fmt: skip

    def versions(self, name: str) -> dict[str, str]:
        """The packages that a program was recorded with, and their versions."""
        return {str(package): str(version) for package, version in self._document(name)["libraries"].items()}

    def predict(self, program: WholeProgram, torch_version: tuple[int, int], library: str | None) -> PredictedRun:
        """Capture a program and replay it on an empty card."""
        from graphmem.accuracy.divergence import changes_of
        from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
        from graphmem.devices import device_named
        from graphmem.replay import replay
        from tests.recorded.steps import runs

        start = time.perf_counter()
        run = self.capture(program, torch_version, library)
        trace = run.trace
        for one, count in run.assumed.items():
            print(f"    assumed {count}: {one.message}", file=sys.stderr)
        # A share of the card's memory that the program set holds on the card it was captured for.
        capacity = device_named(CARD).capacity_bytes if trace.fractions else None
        replayed = replay(trace, PyTorchCachingAllocator(capacity, torch_version=torch_version))
        changes = changes_of(trace)
        return runs.PredictedRun(trace, replayed, changes.sizes, changes.events, time.perf_counter() - start)

    def capture(self, program: WholeProgram, torch_version: tuple[int, int], library: str | None) -> Run:
        """The capture of a program, kept for the next question in the folder that GRAPHMEM_CAPTURES names, if any.
        Many packages import torchvision, which here may be a CUDA build beside a CPU build of PyTorch."""
        words = (self.kind, program.name, getattr(program, "steps", None), "asked" if library else None, "pickle")
        kept = Path(os.environ.get(KEPT, ""), ".".join(str(word) for word in words if word is not None))
        if KEPT in os.environ and kept.exists():
            run: Run = pickle.loads(kept.read_bytes())
            return run
        if program.needs:
            from models_zoo.libraries import make_torchvision_importable

            make_torchvision_importable()
        gc.collect()  # the previous capture goes before the next one starts
        run = replace(program.captured(torch_version, library), other_loop=None)
        if KEPT in os.environ:
            kept.write_bytes(pickle.dumps(replace(run, cudnn=None)))
        return run

    def compare(self, program: WholeProgram, library: str | None = None) -> Comparison:
        from graphmem.accuracy.align import align
        from tests.recorded.steps.runs import Comparison

        recorded = self.load(program.name)
        predicted = self.predict(program, recorded.torch_version, library)
        ours, theirs = ([size for size in run.changes if size > 0] for run in (predicted, recorded))
        return Comparison(recorded, predicted, align(ours, theirs))

    def _document(self, name: str) -> Any:
        return json.loads(gzip.decompress((self.folder / f"{name}{SUFFIX}").read_bytes()))

    def _chosen(self, parts: Sequence[str], recorded: bool = False) -> list[WholeProgram]:
        found = [program for name, program in self.cases().items() if not parts or any(part in name for part in parts)]
        if recorded:
            found = [program for program in found if (self.folder / f"{program.name}{SUFFIX}").exists()]
        return [program for program in found if parts or missing(program) is None]


def captured(
    program: Callable[[], Any], name: str, torch_version: tuple[int, int], library: str | None, **options: Any
) -> Run:
    """The capture of a function on the recordings' card, ``library`` asked for plans; ``options`` of the capture."""
    from graphmem.capture.session.session import capture
    from graphmem.cudnn.library import Cudnn
    from graphmem.runtimes.base import Setting
    from graphmem.runtimes.pytorch.runtime import RUNTIME
    from tests.recorded.device import CARD
    from tests.recorded.steps import runs

    setting = Setting(CARD, torch_version)
    with contextlib.ExitStack() as stack:
        return capture(
            lambda session: program(),
            source=name,
            device=CARD,
            torch_version=torch_version,
            memory=RUNTIME.live(RUNTIME.parse("", setting), setting, room=0),
            cudnn=stack.enter_context(Cudnn(library, runs._card(CARD))) if library else None,
            **options,
        )


def missing(program: WholeProgram) -> str | None:
    """The first of a program's packages that is not installed."""
    return next((name for name in program.needs if importlib.util.find_spec(name) is None), None)


def _options(kind: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog=f"python -m tests.recorded {kind}")
    parser.add_argument("parts", nargs="*", metavar="PART", help="programs whose names contain one of these")
    parser.add_argument("--cudnn-library", metavar="PATH", help="ask this cuDNN for workspaces, as ``--cudnn`` does")
    parser.add_argument("--both", action="store_true", help="predict without it too (table)")
    parser.add_argument("--frees", action="store_true", help="compare frees too (differ)")
    parser.add_argument("-n", "--number", type=int, default=10, help="differences to show")
    options = parser.parse_args(arguments)
    return options, options.parts


def _beside(error: float, recorded: int) -> str:
    return f"{recorded:15,}" if not error else f"{recorded:15,} {error:+.3%}"


def _here(program: WholeProgram, folder: Path) -> None:
    """Run it in this process, on a card or the stub, and write what the allocator did."""
    import torch

    from tests.recorded import true_values
    from tests.recorded.record import launch_no_triton

    launch_no_triton()
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
    report = os.environ["GRAPHMEM_TRUE_VALUES"]
    compiles = getattr(program, "compiles", False)  # values cannot be followed then
    following = contextlib.nullcontext() if compiles else true_values.follow(report)
    with following, peaks_of_the_whole() as peaks:
        held = program.run()
    stats, snapshot = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    allocated, reserved = (max(peaks[level], stats[f"{level}_bytes.all.peak"]) for level in peaks)
    signs = {"alloc": 1, "free_requested": -1}
    read = {"untrue": {}} if compiles else json.loads(Path(report).read_text(encoding="utf-8"))
    document = {
        "program": program.name,
        "torch": torch.__version__,
        "libraries": {name: importlib.metadata.version(name) for name in map(_distribution, program.needs)},
        "unknown_values": {_anywhere(where): count for where, count in read["untrue"].items()},
        "allocated_peak": allocated,
        "reserved_peak": reserved,
        "retries": stats["num_alloc_retries"],
        "changes": [
            signs[event["action"]] * event["size"] for event in snapshot["device_traces"][0] if event["action"] in signs
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(document, separators=(",", ":")).encode()
    (folder / f"{program.name}{SUFFIX}").write_bytes(gzip.compress(data, 9, mtime=0))
    del held
    print(f"{allocated:,} {reserved:,} {len(document['changes'])} changes")
    for where, count in list(document["unknown_values"].items())[:20]:
        print(f"    unknown {count} {where}")


def _distribution(package: str) -> str:
    """The name under which an imported package is installed: ``PIL`` comes with ``pillow``."""
    names = importlib.metadata.packages_distributions().get(package, [package])
    return package if package in names else names[0]


@contextlib.contextmanager
def peaks_of_the_whole() -> Iterator[dict[str, int]]:
    """The peaks that a program has had before it reset them itself."""
    import torch

    peaks, reset = {"allocated": 0, "reserved": 0}, torch._C._cuda_resetPeakMemoryStats

    def kept(device: Any) -> None:
        stats = torch.cuda.memory_stats(device)
        peaks.update({level: max(peaks[level], stats[f"{level}_bytes.all.peak"]) for level in peaks})
        reset(device)

    torch._C._cuda_resetPeakMemoryStats = kept
    try:
        yield peaks
    finally:
        torch._C._cuda_resetPeakMemoryStats = reset


def _anywhere(where: str) -> str:
    """``item at FILE:LINE``, the file as on any machine."""
    return re.sub(r" at .*/site-packages/", " at ", where.replace(f"{places.ROOT}{os.sep}", ""))


if __name__ == "__main__":
    from tests.recorded import kinds

    chosen: Any = kinds.load(sys.argv[1])
    _here(chosen.cases()[sys.argv[2]], Path(sys.argv[3]))
