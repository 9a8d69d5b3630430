"""What events that are late would cost: the worst case beside the figures, where another stream uses tensors."""

from __future__ import annotations

import pytest

from graphmem.analyze import replay_trace
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
    late = [cause for cause in estimate.doubts.causes if cause.name == "work of other streams"]
    if synchronizes or not uses:
        assert (late, estimate.interval("reserved")) == ([], (64 * MIB, 64 * MIB))
    else:
        assert estimate.interval("reserved") == (64 * MIB, 5 * 64 * MIB)
        assert estimate.interval("allocated") == (64 * MIB, 64 * MIB)
        assert "reserved 64.00 to 320.00 MiB" in " ".join(estimate.report(details=True).split())


@pytest.mark.parametrize(("later", "most"), [(0, 1), (1, 2), (9, 5)])
def test_waiting_for_an_event_ends_what_came_before_it(later: int, most: int) -> None:
    """FSDP's limit of all-gathers waits for the second last."""
    builder = TraceBuilder("gathers on a stream of their own")
    operator = builder.operator("c10d.allgather_", phase=builder.phase(1, "forward"))
    for _ in range(5):
        gathered = builder.alloc(64 * MIB, operator, Category.COMMUNICATION)
        builder.event(EventKind.RECORD_STREAM, operator, gathered, 1)
        builder.free(gathered, operator)
        builder.event(EventKind.SYNCHRONIZE, operator, later, 1)
        builder.event(EventKind.SYNCHRONIZE, operator, 0, 2)  # of another stream
    estimate = replay_trace(builder.build(), device="A100-40GB", alloc_conf="", torch_version="2.13")
    assert estimate.interval("reserved") == (64 * MIB, most * 64 * MIB)


def test_lines_that_hold_no_bytes_are_not_listed() -> None:
    """FSDP frees the storage of a parameter that it keeps."""
    builder = TraceBuilder("a program that holds a tensor of no bytes")
    held = [
        builder.alloc(size, builder.operator("aten.empty", source=f"fsdp.py:{size}"), Category.HELD) for size in (0, 8)
    ]
    estimate = replay_trace(builder.build(), device="A100-40GB", alloc_conf="", torch_version="2.13")
    assert len(held) == 2
    assert [one.source for one in estimate.held] == ["fsdp.py:8"]
