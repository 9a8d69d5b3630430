"""PyTorch's own operator database against recordings of the CUDA build.

Whoever differs from a recording has to say so: by an operator that is counted as not modelled or not checked, or by a
value that had to be assumed. ``python -m tests.recorded op_db table`` shows all of it, ``differ`` where one goes
another way. Every recorded call is tried where slow tests run; here an even share of them.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's operator database imports it")

from tests.recorded.op_db.compare import PEAK_EQUAL, VERDICTS, Outcome, outcomes, worst_by_entry  # noqa: E402
from tests.recorded.op_db.record import recordings  # noqa: E402

RECORDED = [document for document in recordings().values() if "changes" in document]
#: One call of so many is tried in every run.
SHARE = 60
#: The least share of entries of which every recorded call is predicted to the byte at its peak.
ENTRIES_EQUAL = 0.95


def test_an_even_share_of_the_database_is_predicted() -> None:
    _judge(list(outcomes(RECORDED[::SHARE])))


@pytest.mark.slow
def test_the_whole_database_is_predicted() -> None:
    _judge(list(outcomes(RECORDED)))


def _judge(found: list[Outcome]) -> None:
    silent = [one.call for one in found if one.verdict == VERDICTS[-1]]
    assert not silent, f"differ in silence; see python -m tests.recorded op_db differ {silent[0]}"
    worst = worst_by_entry(found)
    others = {entry: one.verdict for entry, one in worst.items() if one.verdict not in PEAK_EQUAL}
    assert len(worst) - len(others) >= ENTRIES_EQUAL * len(worst), others
