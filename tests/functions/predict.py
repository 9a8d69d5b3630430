"""The same cases under a capture."""

from __future__ import annotations

from tests.functions import runner
from tests.functions.cases import Case
from tests.recorded.predictions import predicted_changes


def predict(case: Case, selected: float | None = 0.0) -> list[int]:
    """Allocations (positive bytes) and frees (negative) of the case, in order. Raises what a capture raises.

    ``selected``: the share that masks and the like select; none in recordings, where every value is 0.
    """
    return predicted_changes(lambda mark: runner.run(case, mark), case.name, data_dependent=selected)
