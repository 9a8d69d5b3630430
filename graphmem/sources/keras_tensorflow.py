"""A Keras model on its TensorFlow backend: TensorFlow, in a process of its own, prepares the step for a card; its
executor and its kernels are followed here. Nothing is computed, and no card is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.errors import SourceError
from graphmem.figures import MEASURED, TRACE_LEVELS, Cause, seen, unknown
from graphmem.runtimes.base import Taken
from graphmem.runtimes.tensorflow.card import with_eigen_scratch
from graphmem.runtimes.tensorflow.dataflow import trace_of
from graphmem.runtimes.tensorflow.library import CudnnSpaces
from graphmem.runtimes.tensorflow.step import read_step
from graphmem.sources.base import Sizes
from graphmem.trace import EventKind, Trace

TRAINING_ITERATIONS = 3
_PROGRAM = "graphmem.sources.tensorflow_program"
_ESTIMATED = "without a cuDNN to ask (pip install 'graphmem[cudnn]'), workspaces are estimated: copies of all tensors"
_XLA = (
    "XLA compiles this step (jit_compile), and its plan of buffers is not modelled: the figures are those of the step "
    "operator by operator; on five recorded models XLA took 7 % less to 49 % more (jit_compile=False is followed)"
)
_EAGER = "the step runs eagerly (run_eagerly): operators follow in Python's order, gradients are held to its end"


_LOOPS = "operators that repeat are followed once: what a loop keeps of every turn for its gradient is missing"


#: How many per cent more recorded peaks were than predicted ones: 24 training steps of TensorFlow 2.21 on an H200, op
#: by op and without loops (docs/modeling/tensorflow.md).
_MORE_PERCENT = (
    -11.06, -2.05, -1.97, -1.84, -1.33, -0.43, -0.23, -0.19, -0.08, -0.06, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.2, 0.72,
    0.96, 1.4, 1.86, 3.1, 4.9, 12.13,
)  # fmt: skip


def is_installed() -> bool:
    """Whether this Python has TensorFlow, of any build."""
    return find_spec("tensorflow") is not None


def plan_keras(text: str, sizes: Sizes, card: Device, cudnn: Cudnn | None) -> Taken | None:
    """The step of ``FILE.py:FACTORY`` on the card, as TensorFlow runs it; None for a model that is to be trained and is
    not compiled, and where TensorFlow is a build without a card's kernels. Raises :class:`SourceError`."""
    document = _prepared(text, sizes, card)
    if "unprepared" in document:
        return None
    step = read_step(document)
    if sizes.training and not step.training:
        return None
    library = CudnnSpaces(card, cudnn)
    trace = trace_of(step, f"keras:{text}", sizes.iterations or TRAINING_ITERATIONS, library)
    versions = " and ".join(f"{name} {version}" for name, version in step.versions.items())
    notes = [f"the graph is that of {versions}, rewritten by TensorFlow's own optimizer (Grappler) for {card.name}"]
    doubts = [_as_seen(trace)]
    if library.estimated:
        notes.append(_ESTIMATED)
        doubts.append(unknown("cuDNN's workspaces", _ESTIMATED, below=True))
    if step.jit:
        doubts.append(unknown("XLA", _XLA, below=True))
    if step.unfollowed:
        doubts.append(unknown("loops", f"{_LOOPS}: {', '.join(sorted(step.unfollowed))}", below=True))
        notes.append(_LOOPS)
    notes += [text for given, text in ((step.jit, _XLA), (step.eager, _EAGER)) if given]
    return Taken(with_eigen_scratch(trace), tuple(notes), doubts=tuple(doubts), proven="tests/golden/tensorflow")


def _as_seen(trace: Trace) -> Cause:
    """How far peaks may be off, as recorded ones were: threads interleave, and chunks are larger than requests."""
    sign = np.where(trace.kinds == EventKind.ALLOC, 1, -1)
    sizes = np.array([storage.bytes for storage in trace.storages], dtype=np.int64)
    peak = int(np.cumsum(sign * sizes[trace.subjects]).max())
    spread = seen(int(peak * more / 100) for more in _MORE_PERCENT)
    count = len(_MORE_PERCENT)
    inside = round((count - 1) / (count + 1), 4)
    source = f"{count} recorded training steps; threads interleave, and chunks are larger than what was asked for"
    return Cause("TensorFlow's order of kernels", MEASURED, source, dict.fromkeys(TRACE_LEVELS, spread), inside, count)


def _prepared(text: str, sizes: Sizes, card: Device) -> dict[str, Any]:
    capability = card.compute_capability
    if capability is None:
        raise SourceError(f"keras:{text} is analysed for CUDA cards; {card.name} is none")
    asked = {**asdict(sizes), "generate": None, "text": text, "architecture": ".".join(map(str, capability))}
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "step.json")
        request.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", _PROGRAM, str(request), str(result)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if not result.exists():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise SourceError(f"keras:{text}: TensorFlow could not prepare the step: {last[0]}")
        document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return document
