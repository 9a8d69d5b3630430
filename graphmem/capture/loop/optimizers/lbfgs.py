"""L-BFGS decides by values how it goes on: here the values are those of a descent that goes on.

Every evaluation lowers the loss, no tolerance is reached, every pair of step and gradient change has positive curvature
and enters the history, a line search accepts its first point (``torch/optim/lbfgs.py``). The history is most of the
memory of L-BFGS; with constants for values it would stay empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.values import device_values
from graphmem.diagnostics import Code


def patch_lbfgs(patches: Patches, recorder: Recorder) -> None:
    """Replace the step of ``torch.optim.LBFGS`` until ``patches`` are undone."""
    patches.set(torch.optim.LBFGS, "step", _descending(torch.optim.LBFGS.step, recorder))


def _descending(original: Callable[..., object], recorder: Recorder) -> Callable[..., Any]:
    def step(self: object, closure: Callable[[], object]) -> object:
        def evaluate() -> object:
            recorder.phases.enter("forward")  # of the same iteration
            value = closure()
            recorder.phases.enter("optimizer")
            return value

        read_before = recorder.assumed_values.logged
        with device_values.descending():
            value = original(self, evaluate)
        if recorder.assumed_values.logged > read_before:
            recorder.assumed_values.logged = read_before
            recorder.assumed[Code.LBFGS_GOES_ON.about()] += 1
        return value

    return step
