"""The built-in loop around a wrapped model, against recordings of the programs that the options stand for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from graphmem.analyze import analyze  # noqa: E402
from tests.recorded.cases.sharded.options import STEPS, given  # noqa: E402
from tests.recorded.device import CARD  # noqa: E402
from tests.recorded.sharded import KIND  # noqa: E402
from tests.support import packages  # noqa: E402

#: Those that are quick.
FAST = ("option_fsdp", "option_pp_gpipe")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STEPS])
@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_loop_needs_what_its_program_needs(name: str) -> None:
    for package, version in KIND.versions(name).items():
        packages.need(package, version)
    recorded = KIND.load(name)
    factory, batch = given(name)
    estimate = analyze(factory, batch=batch, training=STEPS[name], device=CARD, iterations=3)
    assert (estimate.peak.allocated_bytes, estimate.peak.reserved_bytes) == (
        recorded.peak_allocated_bytes,
        recorded.peak_reserved_bytes,
    )
    assert bool(estimate.breakdown["PARAMETER"]) != (name == "option_fsdp_hybrid")  # whose shards are on the host
