"""The same loops under a capture."""

from __future__ import annotations

from graphmem.trace import Place
from tests.loops import runner
from tests.loops.cases import Case
from tests.recorded.predictions import predicted_changes


def predict(case: Case, place: Place = Place.DEVICE) -> list[int]:
    """Allocations (positive bytes) and frees (negative) of the loop, in order. Raises what a capture raises."""
    selected = 0.0 if case.selects_nothing else None
    return predicted_changes(
        lambda mark: runner.run(case, mark), case.name, place, cudnn_workspaces=False, data_dependent=selected
    )
