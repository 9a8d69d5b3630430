"""Programs of one rank of several against their recordings, with a ratchet: one may get closer, never further away.

``sharded_ratchet.json`` beside the recordings holds what was reached. A program is skipped where one of its packages is
missing or of another version than the recording's. ``pytest -m slow --update-goldens`` writes the ratchet anew.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build has no torch.distributed", allow_module_level=True)

from tests.recorded.sharded import KIND, PROGRAMS  # noqa: E402
from tests.support import packages, ratchet  # noqa: E402

RATCHET = KIND.folder.parent / "sharded_ratchet.json"
#: Some of those that need nothing but PyTorch and transformers.
QUICK = {"tp_loss", "f2_offload", "ep_capacity"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KIND.recorded()]
)
@pytest.mark.filterwarnings("ignore")
def test_a_program_is_predicted_no_worse_than_before(name: str, request: pytest.FixtureRequest) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    compared = KIND.compare(PROGRAMS[name])
    ratchet.hold_run(RATCHET, "sharded", name, compared, bool(request.config.getoption("--update-goldens")))


def test_every_recording_is_of_a_program_and_has_an_entry() -> None:
    recorded = set(KIND.recorded())
    assert recorded <= set(PROGRAMS)
    assert set(ratchet.read(RATCHET)) == recorded
