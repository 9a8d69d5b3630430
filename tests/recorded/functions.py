"""Single functions and modules (:mod:`tests.recorded.cases.functions`): run, predicted, and where they are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphmem.cudnn.library import Cudnn
from tests import places
from tests.recorded.case import Documents
from tests.recorded.cases.functions import CASES, Case
from tests.recorded.kind import Changes
from tests.recorded.predict import predicted_changes
from tests.recorded.record import load

FOLDER = places.PYTORCH / "functions"


def run(case: Case, mark: Callable[[], None]) -> None:
    """Set the case up, then run it between two calls of ``mark``; everything that it returns stays alive."""
    torch.manual_seed(0)
    tensors = [tensor.make() for tensor in case.tensors]
    arguments = [case.module().to("cuda"), *tensors] if case.module is not None else tensors
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(case.grad):
            mark()
            outputs = case.run(*arguments)
            roots = [out for out in leaves(outputs) if out.requires_grad]
            gradients = [torch.empty_like(root) for root in roots]
            if roots:
                torch.autograd.backward(roots, gradients)
            mark()
    finally:
        gc.enable()


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def predict(case: Case, selected: float | None = 0.0, cudnn: Cudnn | None = None) -> list[int]:
    """Allocations (positive bytes) and frees (negative) of the case, in order. Raises what a capture raises.

    ``selected``: the share that masks and the like select; none in recordings, where every value is 0. ``cudnn``: the
    library that is asked.
    """
    return predicted_changes(lambda mark: run(case, mark), case.name, data_dependent=selected, cudnn=cudnn)


def recordings() -> Documents:
    """Every recording by name of its case."""
    return load(FOLDER)


KIND = Changes(CASES, FOLDER, run, predict)
