"""transformers' ``generate``, as ``graphmem analyze --generate`` predicts it, against recordings, with a ratchet."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.generations import CASES, KIND  # noqa: E402
from tests.support import packages, ratchet  # noqa: E402

RATCHET = KIND.folder.parent / "generations_ratchet.json"
#: Predicted in a second or two each.
QUICK = ("static_llama", "chunked_llama")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KIND.recorded()]
)
def test_a_generation_is_predicted_no_worse_than_before(name: str, request: pytest.FixtureRequest) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    compared = KIND.compare(CASES[name])
    ratchet.hold_run(RATCHET, "generations", name, compared, bool(request.config.getoption("--update-goldens")))


def test_every_generation_is_recorded_and_has_its_entry() -> None:
    assert set(KIND.recorded()) == set(CASES)
    assert set(ratchet.read(RATCHET)) == set(CASES)
