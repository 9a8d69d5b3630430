"""Predicted programs of libraries against their recordings, with a ratchet: one may get closer, never further away.

``libraries_ratchet.json`` beside the recordings holds what was reached with the cuDNN asked that GRAPHMEM_CUDNN names.
A program is skipped without it, and where one of its packages is missing or of another version than the recording's.
``pytest -m slow --update-goldens`` writes the ratchet anew.
"""

from __future__ import annotations

import importlib.metadata
import os

import pytest

torch = pytest.importorskip("torch")

from tests.recorded import libraries  # noqa: E402
from tests.recorded.cases.libraries import CASES  # noqa: E402
from tests.support import ratchet  # noqa: E402

RATCHET = libraries.FOLDER.parent / "libraries_ratchet.json"
_RECORDED = sorted(name for name in CASES if (libraries.FOLDER / f"{name}{libraries.SUFFIX}").exists())


@pytest.mark.slow
@pytest.mark.parametrize("name", _RECORDED)
def test_a_program_is_predicted_no_worse_than_before(name: str, request: pytest.FixtureRequest) -> None:
    for package, version in libraries.versions(name).items():
        _needs(package, version)
    library = os.environ.get("GRAPHMEM_CUDNN")
    if library is None:
        pytest.skip("needs GRAPHMEM_CUDNN, a cuDNN library to ask for workspaces")
    compared = libraries.compare(CASES[name], library=library)
    update = bool(request.config.getoption("--update-goldens"))
    ratchet.hold_run(RATCHET, "libraries", name, compared, update)


def test_every_recording_is_of_a_program_and_has_an_entry() -> None:
    recorded = {path.name.removesuffix(libraries.SUFFIX) for path in libraries.FOLDER.glob(f"*{libraries.SUFFIX}")}
    assert recorded == set(_RECORDED)
    assert set(ratchet.read(RATCHET)) == recorded


def _needs(package: str, version: str) -> None:
    """Skip where ``package`` is not there in this version, up to its last number."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {package}")
    if found.split(".")[:2] != version.split(".")[:2]:
        pytest.skip(f"recorded with {package} {version}, and {found} is installed")
