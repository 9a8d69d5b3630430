"""Everyday programs, as ``graphmem run`` predicts them, against their recordings, with a ratchet: none gets worse.

Two ratchets beside the recordings: ``everyday_trees_ratchet.json`` holds what is reached with cuDNN's workspaces
predicted, ``everyday_ratchet.json`` what is reached with the cuDNN asked that GRAPHMEM_CUDNN names; that half is
skipped without it. ``pytest -m "slow or not slow" --update-goldens`` on this file writes both anew.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.everyday import KIND, programs  # noqa: E402
from tests.support import packages, ratchet  # noqa: E402

ASKED = KIND.folder.parent / "everyday_ratchet.json"
TREES = KIND.folder.parent / "everyday_trees_ratchet.json"
#: Predicted in a second or two each.
QUICK = ("mnist", "moe", "pruned_compressed", "simclr", "wgan_gp")
_PROGRAMS = programs()


def _held(name: str, library: str | None, request: pytest.FixtureRequest) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    compared = KIND.compare(_PROGRAMS[name], library)
    update = bool(request.config.getoption("--update-goldens"))
    ratchet.hold_run(TREES if library is None else ASKED, "everyday", name, compared, update)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KIND.recorded()]
)
def test_a_program_is_predicted_no_worse_than_before(name: str, request: pytest.FixtureRequest) -> None:
    _held(name, None, request)


@pytest.mark.slow
@pytest.mark.parametrize("name", KIND.recorded())
def test_a_program_with_cudnn_asked_is_predicted_no_worse_than_before(
    name: str, request: pytest.FixtureRequest
) -> None:
    library = os.environ.get("GRAPHMEM_CUDNN")
    if library is None:
        pytest.skip("needs GRAPHMEM_CUDNN, a cuDNN library to ask for workspaces")
    _held(name, library, request)


def test_every_program_is_recorded_and_has_its_entries() -> None:
    recorded = set(KIND.recorded())
    assert recorded == set(_PROGRAMS)
    assert set(ratchet.read(TREES)) == recorded
    assert set(ratchet.read(ASKED)) == recorded
