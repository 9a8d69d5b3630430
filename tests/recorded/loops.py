"""Training loops (:mod:`tests.recorded.cases.loops`): run, predicted, and where they are kept.

Those of recurrent networks are a kind of their own: recorded with a cuDNN that says what it asks for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from graphmem.capture.operators import sparse
from graphmem.trace import Place
from tests import places
from tests.recorded import recurrent
from tests.recorded.case import Documents
from tests.recorded.cases.loops import CASES, Case
from tests.recorded.kind import Changes
from tests.recorded.predict import predicted_changes
from tests.recorded.record import load

FOLDER, RECURRENT_FOLDER = places.PYTORCH / "loops", places.PYTORCH / "recurrent"
#: Groups of the loops that are recorded with cuDNN's spaces.
WITH_SPACES = frozenset(("packed", "recurrent"))


def run(case: Case, mark: Callable[[], None]) -> None:
    """The loop between two calls of ``mark``; what it holds or yields at its end stays alive until the second one.

    Without cuDNN's attention, whose workspace is cuDNN's own affair.
    """
    torch.manual_seed(0)
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    if case.group in WITH_SPACES:
        recurrent.warm_up()
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
    selected: float | None = None
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if case.selects_nothing:  # nor are indices distinct, which a capture knows where it knows them
        selected, context = 0.0, mock.patch.object(sparse, "distinct", lambda indices: indices[:, :0])
    with context:
        return predicted_changes(
            lambda mark: run(case, mark),
            case.name,
            place,
            cudnn_workspaces=case.group in WITH_SPACES,
            data_dependent=selected,
        )


def recordings() -> Documents:
    """Every recording by name of its loop."""
    return load(FOLDER) | load(RECURRENT_FOLDER)


def _kind(folder: Path, with_spaces: bool) -> Changes:
    cases = {name: case for name, case in CASES.items() if (case.group in WITH_SPACES) == with_spaces}
    return Changes(cases, folder, run, predict, wanted=lambda case: not case.refused)


KIND = _kind(FOLDER, with_spaces=False)
RECURRENT = _kind(RECURRENT_FOLDER, with_spaces=True)
