"""An error of a step of PyTorch's own modules names the module, or the loss, as no line of the user's raised it."""

from __future__ import annotations

import pytest

import graphmem
from graphmem.errors import GraphmemError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("last", "wrong", "place"), [(32, 16, "module 2: the step"), (16, 15, "the loss: the step")])
def test_a_wrong_shape_has_a_place(last: int, wrong: int, place: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(last, 4))
    inputs, targets = torch.zeros(wrong + 1, 8), torch.zeros(wrong, dtype=torch.long)
    with pytest.raises(GraphmemError, match=f"^{place} raised"):
        graphmem.analyze(lambda: (model, inputs, targets, torch.nn.functional.cross_entropy))
