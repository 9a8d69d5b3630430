"""Predicted programs of libraries against their recordings, with a ratchet: one may get closer, never further away.

``libraries_ratchet.json`` beside the recordings holds what was reached with the cuDNN asked that GRAPHMEM_CUDNN names.
A program is skipped without it, and where one of its packages is missing or of another version than the recording's.
``pytest -m slow --update-goldens`` writes the ratchet anew.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.libraries import KIND, PROGRAMS  # noqa: E402
from tests.support import packages, ratchet  # noqa: E402

RATCHET = KIND.folder.parent / "libraries_ratchet.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", KIND.recorded())
def test_a_program_is_predicted_no_worse_than_before(name: str, request: pytest.FixtureRequest) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    library = os.environ.get("GRAPHMEM_CUDNN")
    if library is None:
        pytest.skip("needs GRAPHMEM_CUDNN, a cuDNN library to ask for workspaces")
    compared = KIND.compare(PROGRAMS[name], library)
    update = bool(request.config.getoption("--update-goldens"))
    ratchet.hold_run(RATCHET, "libraries", name, compared, update)


def test_every_recording_is_of_a_program_and_has_an_entry() -> None:
    recorded = set(KIND.recorded())
    assert recorded <= set(PROGRAMS)
    assert set(ratchet.read(RATCHET)) == recorded
