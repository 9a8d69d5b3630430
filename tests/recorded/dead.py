"""Runs that ran out of memory, and the same runs with settings that may have saved them, on the stub's small cards.

    python -m tests.recorded dead record [part of a name ...]

writes for every run ``NAME.pickle.gz``, the snapshot that its observer of out-of-memory errors took, and into
``survivors.json`` how the same run ended with each of :data:`SETTINGS`, and with batches of one less where it has one
size of batches: the bytes that it was refused, or 0 where it ran to its end.
"""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import places
from tests.recorded import stub

FOLDER = places.PYTORCH / "dead"
SURVIVORS = FOLDER / "survivors.json"
SUFFIX = ".pickle.gz"

#: Allocator settings that each run is repeated with.
SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
)
#: What stands for the context, in MiB.
_CONTEXT_MIB = 500


@dataclass(frozen=True)
class Dead:
    """A run of ``program(batch)``. ``room_mib`` is what its card leaves to the allocator."""

    program: Callable[[int], Any]
    batch: int
    room_mib: int


def _tokens(rows: int, length: int) -> dict[str, Any]:
    import torch

    ids = torch.zeros((rows, length), dtype=torch.long)
    return {"input_ids": ids.to("cuda"), "labels": ids.to("cuda")}


def _lengths_that_vary(batch: int) -> Any:
    import torch

    from tests.recorded.cases.written import _GPT2, model_of

    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        for length in (100, 128, 115):
            tokens = _tokens(batch, length)
            outputs = model(**tokens)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def _one_size(batch: int) -> Any:
    import torch

    from tests.recorded.cases.written import _GPT2, model_of

    model = model_of(_GPT2).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = _tokens(batch, 128)
    for _ in range(3):
        outputs = model(**tokens)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


RUNS: Mapping[str, Dead] = {
    "lengths_that_vary": Dead(_lengths_that_vary, 10, 1550),
    "one_size": Dead(_one_size, 12, 1500),
}


def recorded(name: str) -> Any:
    """The snapshot of a run."""
    return pickle.loads(gzip.decompress((FOLDER / f"{name}{SUFFIX}").read_bytes()))


def survivors() -> dict[str, dict[str, int]]:
    """By run and setting: the bytes that were refused, 0 where it ran to its end."""
    found: dict[str, dict[str, int]] = json.loads(SURVIVORS.read_text(encoding="utf-8"))
    return found


class _Kind:
    def record(self, arguments: list[str]) -> int:
        FOLDER.mkdir(parents=True, exist_ok=True)
        ended = survivors() if SURVIVORS.exists() else {}
        for name, run in RUNS.items():
            if arguments and not any(part in name for part in arguments):
                continue
            status = self._run(name, run, run.batch, "", FOLDER / f"{name}{SUFFIX}")
            if status < 0:
                return 1
            ended[name] = {"": status}
            ended[name] |= {conf: self._run(name, run, run.batch, conf, None) for conf in SETTINGS}
            ended[name]["batch of one less"] = self._run(name, run, run.batch - 1, "", None)
            print(name, ended[name], flush=True)
        SURVIVORS.write_text(json.dumps(ended, indent=1) + "\n", encoding="utf-8")
        return 0

    def _run(self, name: str, run: Dead, batch: int, conf: str, file: Path | None) -> int:
        """The bytes that it was refused; 0: it ran to its end; -1: it failed otherwise."""
        told = FOLDER / "refused"
        told.unlink(missing_ok=True)
        environment = {
            "FAKE_CUDA_TOTAL_MIB": str(run.room_mib + _CONTEXT_MIB),
            "FAKE_CUDA_OTHER_MIB": str(_CONTEXT_MIB),
            "FAKE_CUDA_CC": "90",
            "GRAPHMEM_TRUE_VALUES": "/dev/null",
            "FAKE_CUDA_SENT": "1",
        }
        if conf:
            environment["PYTORCH_ALLOC_CONF"] = conf
        stub.run(["-m", "tests.recorded.dead", name, str(batch), str(told), str(file or "")], environment)
        if not told.exists():
            return -1
        refused = int(told.read_text())
        told.unlink()
        return refused

    def table(self, arguments: list[str]) -> int:
        print("what settings would have done is compared by tests/planning/test_post_mortem.py")
        return 0

    differ = table


KIND = _Kind()


def _here(run: Dead, batch: int, told: Path, file: str) -> None:
    import torch

    from tests.recorded import true_values

    asked = [0]

    def observe(device: int, size: int, total: int, free: int) -> None:
        asked[0] = size
        if file:
            data = pickle.dumps(_anywhere(torch.cuda.memory._snapshot()), protocol=4)
            Path(file).write_bytes(gzip.compress(data, 9, mtime=0))

    torch.manual_seed(0)
    with true_values.follow():
        torch.cuda.init()
        torch._C._cuda_attach_out_of_memory_observer(observe)
        if file:
            torch.cuda.memory._record_memory_history(enabled="all", max_entries=1_000_000)
        try:
            run.program(batch)
        except torch.OutOfMemoryError:
            assert asked[0]
    told.write_text(str(asked[0]))


def _anywhere(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The parts that are read, files named as on any machine, without the frames of the interpreter."""
    known: dict[int, list[Any]] = {}

    def frames(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if id(given) not in known:
            own = (frame for frame in given if not frame["filename"].endswith("true_values.py"))
            known[id(given)] = [frame | {"filename": _file(frame["filename"])} for frame in own]
        return known[id(given)]

    def cleaned(row: dict[str, Any]) -> dict[str, Any]:
        return {key: frames(value) if key == "frames" else value for key, value in row.items() if key != "time_us"}

    segments = [
        cleaned(segment) | {"blocks": [cleaned(block) for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    traces = [[cleaned(event) for event in events] for events in snapshot["device_traces"]]
    return {"segments": segments, "device_traces": traces, "allocator_settings": snapshot["allocator_settings"]}


def _file(name: str) -> str:
    for mark in ("/site-packages/", f"{places.ROOT}/"):
        if mark in name:
            return ("site-packages/" if "site" in mark else "") + name.partition(mark)[2]
    return Path(name).name


if __name__ == "__main__":
    chosen = RUNS[sys.argv[1]]
    _here(chosen, int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
