"""The built-in step against loops written by hand: with the options that ask for the same, both peaks are equal."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.written import KIND, PROGRAMS  # noqa: E402
from tests.support import packages  # noqa: E402

#: Predicted in a second or two each.
QUICK = ("held", "dropped", "criterion_held", "lengths_of_a_factory", "evaluation_dropped", "prefetched_three_ahead")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KIND.recorded()]
)
def test_the_built_in_step_takes_what_the_loop_written_by_hand_took(name: str) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    compared = KIND.compare(PROGRAMS[name])
    predicted, recorded = compared.predicted.replay, compared.recorded
    assert predicted.peak_allocated_bytes == recorded.peak_allocated_bytes
    assert predicted.peak_reserved_bytes == recorded.peak_reserved_bytes
    assert compared.match.share == 1


def test_every_loop_is_recorded() -> None:
    assert set(KIND.recorded()) == set(PROGRAMS)
