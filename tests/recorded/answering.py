"""Programs that ask the allocator while they run: what they find on the CUDA build, and in a capture.

    python -m tests.recorded answering record [part of a name ...]

writes ``answering.json`` of its version: for every program what it returned, and the allocator's statistics at its end.
Each runs in a process of its own, on a card of :data:`~tests.recorded.cases.answering.CARD_MIB`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device, described_device
from graphmem.runtimes.base import Runs, Setting
from graphmem.runtimes.pytorch import RUNTIME
from graphmem.trace import Trace
from graphmem.units import MIB
from tests import places
from tests.recorded import stub
from tests.recorded.cases.answering import CARD_MIB, OTHER_MIB, PROGRAMS, WITH_CUDNN

GOLDEN = places.PYTORCH / "answering.json"
#: The card of the recordings. ``OTHER_MIB`` stands for its context.
CARD: Device = replace(
    described_device("stub", (9, 0), CARD_MIB * MIB, 132, 2048), context_bytes=OTHER_MIB * MIB, context_measured=True
)
SETTING = Setting(CARD, places.PYTORCH_VERSION)
_ENVIRONMENT = {"FAKE_CUDA_TOTAL_MIB": str(CARD_MIB), "FAKE_CUDA_OTHER_MIB": str(OTHER_MIB), "FAKE_CUDA_CC": "90"}

Document = dict[str, Any]


def recorded() -> dict[str, Document]:
    """By name: ``found`` and ``statistics``."""
    documents: dict[str, Document] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return documents


def answers(name: str) -> Document:
    """Run a program here."""
    import torch

    found = dict(PROGRAMS[name]())
    return {"found": found, "statistics": dict(torch.cuda.memory_stats())}


def predict(name: str, library: str = "never") -> tuple[Document, Trace, Runs]:
    """What a capture on the card says, its trace, and the replay. ``library``: the cuDNN that is asked."""
    from graphmem.capture.session.session import capture

    options = RUNTIME.parse("", SETTING)
    document: Document = {}
    with contextlib.nullcontext() if library == "never" else Cudnn(library, CARD) as cudnn:
        trace = capture(
            lambda _: document.update(answers(name)),
            source=name,
            device=CARD,
            torch_version=SETTING.torch_version,
            cudnn_workspaces=name in WITH_CUDNN,
            cudnn=cudnn,
            memory=RUNTIME.live(options, SETTING, room=1),
        ).trace
    return document, trace, RUNTIME.run(trace, options, SETTING)


class Answering:
    """The kind."""

    def record(self, arguments: list[str]) -> int:
        """Each program in a fresh process on the stub."""
        documents = recorded() if GOLDEN.exists() else {}
        for name in _named(arguments):
            environment = _ENVIRONMENT | (stub.REAL_CUDNN if name in WITH_CUDNN else {})
            status = stub.run(["-m", "tests.recorded.answering", name, str(GOLDEN.with_suffix(".one"))], environment)
            if status:
                return status
            one = GOLDEN.with_suffix(".one")
            documents[name] = json.loads(one.read_text(encoding="utf-8"))
            one.unlink()
        ordered = {name: documents[name] for name in PROGRAMS if name in documents}
        GOLDEN.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        return 0

    def table(self, arguments: list[str]) -> int:
        """A line a program: recorded and predicted peaks, and how many figures differ."""
        for name in _named(arguments):
            truth, (said, _, runs) = recorded()[name], predict(name, _library())
            peaks = [truth["statistics"][f"{level}_bytes.all.peak"] for level in ("allocated", "reserved")]
            main = (runs.main.peak_allocated_bytes, runs.main.peak_reserved_bytes)
            differing = _differing(truth, said)
            print(f"{name:24s} peaks by the statistics {peaks}, of the run {main}, figures that differ: {differing}")
        return 0

    def differ(self, arguments: list[str]) -> int:
        """Every figure that differs."""
        for name in _named(arguments):
            truth, (said, _, _) = recorded()[name], predict(name, _library())
            for part in ("found", "statistics"):
                for key in truth[part]:
                    if truth[part][key] != said[part].get(key):
                        print(f"{name}: {part} {key!r}: recorded {truth[part][key]}, predicted {said[part].get(key)}")
        return 0


def _library() -> str:
    return os.environ.get("GRAPHMEM_CUDNN", "never")


def _differing(truth: Document, said: Document) -> dict[str, int]:
    return {part: sum(truth[part][key] != said[part].get(key) for key in truth[part]) for part in truth}


def _named(parts: list[str]) -> list[str]:
    return [name for name in PROGRAMS if not parts or any(part in name for part in parts)]


KIND = Answering()

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answers(sys.argv[1])), encoding="utf-8")
