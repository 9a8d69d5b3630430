"""Programs that train in several runs, or on batches of many sizes, as ``graphmem run`` predicts them in a few steps,
against their recordings to the end, with a ratchet: none gets worse. Those with convolutions need GRAPHMEM_CUDNN."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.left_early import KIND, RATCHET, programs  # noqa: E402
from tests.support import packages, ratchet  # noqa: E402

_PROGRAMS = programs()
#: Predicted in some seconds, without convolutions.
QUICK = ("runs_kfold", "runs_context_curriculum")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KIND.recorded()]
)
def test_a_program_is_predicted_no_worse_than_before(name: str, request: pytest.FixtureRequest) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    library = os.environ.get("GRAPHMEM_CUDNN")
    if library is None and b"onv" in _PROGRAMS[name].path.read_bytes():
        pytest.skip("needs GRAPHMEM_CUDNN, a cuDNN library to ask for workspaces")
    compared = KIND.compare(_PROGRAMS[name], library)
    ratchet.hold_peaks(RATCHET, "left_early", name, compared, bool(request.config.getoption("--update-goldens")))


def test_every_program_is_recorded_and_has_its_entry() -> None:
    assert set(KIND.recorded()) == set(_PROGRAMS) == set(ratchet.read(RATCHET))
