"""Whole programs: recorded as they are, in a process of their own, and predicted as ``graphmem run`` runs them.

    python -m tests.recorded scripts record [part of a name ...]

A program is recorded for as many optimizer steps as its arguments say, and predicted from arguments that say
thousands. ``scripts/<name>.json.gz`` has the peaks at three levels and every change of memory: bytes asked for and,
negative, given back. Convolutions' plans take nothing there.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import places
from tests.recorded import stub

FOLDER = places.PYTORCH / "scripts"
PROGRAMS = places.ROOT / "tests" / "recorded" / "cases" / "scripts"
_MIB = 1 << 20


@dataclass(frozen=True)
class Script:
    """A program with ``given`` arguments. ``short`` are those that end it after ``steps`` optimizer steps when it is
    recorded; it is predicted without them. ``processes``: as one of how many. ``needs``: packages."""

    name: str
    file: str
    given: tuple[str, ...]
    short: tuple[str, ...]
    steps: int = 3
    processes: int = 1
    needs: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return PROGRAMS / f"{self.file}.py"


def _script(
    name: str, given: str, short: str, *, processes: int = 1, needs: tuple[str, ...] = (), file: str = ""
) -> Script:
    return Script(name, file or name, tuple(given.split()), tuple(short.split()), processes=processes, needs=needs)


_TRAINER = ("transformers", "accelerate")
CASES = {
    script.name: script
    for script in (
        _script("nano_gpt", "--eval-iters 4", "--max-iters 3"),
        _script("nano_gpt_fp32", "--eval-iters 4 --dtype float32 --dropout 0", "--max-iters 3", file="nano_gpt"),
        _script("classification", "", "--max-steps 3 --epochs 1"),
        _script("classification_amp", "--amp", "--max-steps 3 --epochs 1", file="classification"),
        _script("diffusion", "--sampling-steps 8", "--train-num-steps 3"),
        _script("diffusion_amp", "--amp --sampling-steps 8", "--train-num-steps 3", file="diffusion"),
        # Predicted with what ends them too: their rows are of many lengths, of which three steps have only some.
        _script("trainer", "--max-steps 3", "", needs=_TRAINER),
        _script(
            "trainer_bf16", "--max-steps 3 --bf16 --gradient-accumulation-steps 2", "", needs=_TRAINER, file="trainer"
        ),
        _script("ddp", "", "--epochs 1 --rows 768", processes=8),
    )
}


def load() -> dict[str, dict[str, Any]]:
    """Every recording by name."""
    documents = [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(FOLDER.glob("*.json.gz"))]
    return {document["case"]: document for document in documents}


# --- on the CUDA build ------------------------------------------------------------------------------------------------


def _record(script: Script) -> int:
    """In a process of its own; its exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    launched = {}
    if script.processes > 1:
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(script.processes), "FAKE_CUDA_SENT": "1",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    return stub.run(["-m", "tests.recorded.scripts", script.name], launched)


def _run_here(script: Script) -> dict[str, Any]:
    import runpy

    import torch

    from tests.recorded import record, true_values

    if script.processes > 1:
        without_others()
    record.launch_no_triton()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
    sys.argv = [str(script.path), *script.given, *script.short]
    sys.path.insert(0, str(script.path.parent))
    with tempfile.TemporaryDirectory() as folder, true_values.follow():
        tempfile.tempdir = folder
        runpy.run_path(str(script.path), run_name="__main__")
    stats = torch.cuda.memory_stats()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    sign = {"alloc": 1, "free_requested": -1}
    return {
        "case": script.name,
        "torch": torch.__version__,
        **{f"{level}_bytes": stats[f"{level}_bytes.all.peak"] for level in ("requested", "allocated", "reserved")},
        "changes": [sign[e["action"]] * e["size"] for e in events if e["action"] in sign],
    }


def without_others(backend: str = "alone") -> None:
    """Process groups of which nobody else is a member: those whose works have results, or PyTorch's own (``fake``)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    from tests.recorded.cases.parallel.group import register_alone

    del fake_pg
    register_alone()
    module: Any = dist.distributed_c10d
    make = module._new_process_group_helper

    def helper(size: int, rank: int, ranks: Any, _: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update((name, None) for name in ("backend_options", "pg_options", "device_id") if name in kwargs)
        return make(size, rank, ranks, dist.Backend(backend), store, *args, **kwargs)

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Any:
        yield (
            dist.HashStore(),
            rank if rank >= 0 else int(os.environ.get("RANK", "0")),
            world_size if world_size > 0 else int(os.environ["WORLD_SIZE"]),
        )

    module._new_process_group_helper = helper
    module.rendezvous = rendezvous


# --- without one ------------------------------------------------------------------------------------------------------


def predict(script: Script, short: bool = False) -> dict[str, Any]:
    """What ``graphmem run`` predicts, convolutions' plans taking nothing; with ``short``, of the recorded arguments."""
    import torch

    from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator
    from graphmem.capture.program.main_module import run_program
    from graphmem.capture.session.session import Session, capture
    from graphmem.replay import replay
    from graphmem.trace import EventKind, Place
    from graphmem.training.processes import Processes
    from graphmem.training.program import Program, Steps
    from tests.recorded.device import CARD, TORCH_VERSION

    program = Program(str(script.path), (*script.given, *(script.short if short else ())))

    def run(session: Session) -> None:
        assert session.leaving is not None
        torch.backends.cuda.enable_cudnn_sdp(False)
        with contextlib.redirect_stdout(io.StringIO()):
            ending = run_program(program, session.leaving)
        assert not ending.failed, ending.words()

    processes = Processes(script.processes) if script.processes > 1 else None
    trace = capture(
        run,
        source=script.name,
        device=CARD,
        torch_version=TORCH_VERSION,
        cudnn_workspaces=False,
        processes=processes,
        leave_after=Steps(script.steps, 0),
    ).trace
    held = replay(trace, PyTorchCachingAllocator())
    changes = []
    for event in trace.events():
        if event.kind in (EventKind.ALLOC, EventKind.FREE):
            storage = trace.storages[event.subject]
            if storage.place is Place.DEVICE and storage.bytes:
                changes.append(storage.bytes if event.kind is EventKind.ALLOC else -storage.bytes)
    peaks = {level: getattr(held, f"peak_{level}_bytes") for level in ("requested", "allocated", "reserved")}
    return {**{f"{level}_bytes": value for level, value in peaks.items()}, "changes": changes}


class _Scripts:
    """The programs as a kind of recording."""

    def record(self, arguments: list[str]) -> int:
        failed = [script.name for script in self._chosen(arguments) if _record(script)]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return bool(failed)

    def table(self, arguments: list[str]) -> int:
        recorded = load()
        print(
            f"{'program':20} {'allocated: recorded':>22} {'predicted':>12} {'reserved: recorded':>20} {'predicted':>12}"
        )
        for script in self._chosen(arguments):
            truth, said = recorded[script.name], predict(script)
            figures = [(truth[key], said[key]) for key in ("allocated_bytes", "reserved_bytes")]
            print(f"{script.name:20}", *(f"{a:>20,} {b:>14,} {100 * (b / a - 1):+.2f} %" for a, b in figures))
        return 0

    def differ(self, arguments: list[str]) -> int:
        recorded = load()
        for script in self._chosen(arguments):
            truth, said = recorded[script.name]["changes"], predict(script, short=True)["changes"]
            part = next(
                (i for i, (a, b) in enumerate(zip(truth, said, strict=False)) if a != b), min(len(truth), len(said))
            )
            if truth == said:
                print(f"{script.name}: the same {len(truth)} changes")
            else:
                print(f"{script.name}: change {part} of {len(truth)} (predicted {len(said)}):")
                print("  recorded ", *truth[max(part - 3, 0) : part + 8])
                print("  predicted", *said[max(part - 3, 0) : part + 8])
        return 0

    @staticmethod
    def _chosen(arguments: list[str]) -> list[Script]:
        return [s for s in CASES.values() if not arguments or any(part in s.name for part in arguments)]


KIND = _Scripts()

if __name__ == "__main__":
    document = _run_here(CASES[sys.argv[1]])
    file = FOLDER / f"{document['case']}.json.gz"
    file.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))
    print(
        document["case"], document["allocated_bytes"], document["reserved_bytes"], len(document["changes"]), flush=True
    )
