"""Training loops (:mod:`tests.recorded.cases.loops`): run, predicted, and where they are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from graphmem.trace import Place
from tests import places
from tests.recorded.case import Documents
from tests.recorded.cases.loops import CASES, Case
from tests.recorded.kind import Changes
from tests.recorded.predict import predicted_changes
from tests.recorded.record import load

FOLDER = places.PYTORCH / "loops"


def run(case: Case, mark: Callable[[], None]) -> None:
    """The loop between two calls of ``mark``; what it holds or yields at its end stays alive until the second one.

    Without cuDNN's attention, whose workspace is cuDNN's own affair.
    """
    torch.manual_seed(0)
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    gc.collect()
    gc.disable()
    loop: Any = case.run()
    try:
        mark()
        held = next(loop)
        mark()
        del held
    finally:
        loop.close()
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        gc.enable()


def predict(case: Case, place: Place = Place.DEVICE) -> list[int]:
    """Allocations (positive bytes) and frees (negative) of the loop, in order. Raises what a capture raises."""
    selected = 0.0 if case.selects_nothing else None
    return predicted_changes(
        lambda mark: run(case, mark), case.name, place, cudnn_workspaces=False, data_dependent=selected
    )


def recordings() -> Documents:
    """Every recording by name of its loop."""
    return load(FOLDER)


KIND = Changes(CASES, FOLDER, run, predict, wanted=lambda case: not case.refused)
