"""What events that are late would cost: the worst case beside the figures, where another stream uses tensors."""

from __future__ import annotations

import pytest

from graphmem.analyze import replay_trace
from graphmem.replay import replay
from graphmem.runtimes.pytorch import runtime
from graphmem.trace import Category, EventKind, TraceBuilder
from graphmem.units import MIB


@pytest.mark.parametrize("uses", [True, False])
@pytest.mark.parametrize("synchronizes", [True, False])
def test_the_worst_case_is_that_no_event_is_ready_before_a_synchronization(uses: bool, synchronizes: bool) -> None:
    builder = TraceBuilder("gathers on a stream of their own")
    operator = builder.operator("c10d.allgather_", phase=builder.phase(1, "forward"))
    for _ in range(5):
        gathered = builder.alloc(64 * MIB, operator, Category.COMMUNICATION)
        if uses:
            builder.event(EventKind.RECORD_STREAM, operator, gathered, 1)
        builder.free(gathered, operator)
        if synchronizes:
            builder.event(EventKind.SYNCHRONIZE, operator)
    estimate = replay_trace(builder.build(), device="A100-40GB", alloc_conf="", torch_version="2.13")
    assert estimate.reserved == 64 * MIB
    notes = [one.message for one in estimate.diagnostics if "work of other streams" in one.message]
    if not uses:
        assert "late_events" not in estimate.details
    else:
        late = estimate.details["late_events"]["reserved_bytes"]
        assert late == (64 if synchronizes else 5 * 64) * MIB
        assert bool(notes) == (not synchronizes)
        assert synchronizes or "256.00 MiB more" in notes[0]


def test_it_is_replayed_only_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[object] = []
    monkeypatch.setattr(runtime, "replay", lambda *given: played.append(given) or replay(*given))
    builder = TraceBuilder("a gather on a stream of its own")
    operator = builder.operator("c10d.allgather_", phase=builder.phase(1, "forward"))
    gathered = builder.alloc(64 * MIB, operator, Category.COMMUNICATION)
    builder.event(EventKind.RECORD_STREAM, operator, gathered, 1)
    estimate = replay_trace(builder.build(), device="A100-40GB", alloc_conf="", torch_version="2.13")
    more = estimate.with_details(colour="red")
    assert (more.details["colour"], played) == ("red", [])
    assert more.details["late_events"]["reserved_bytes"] == 64 * MIB
    assert estimate.details["late_events"] == more.details["late_events"]
    assert len(played) == 1
