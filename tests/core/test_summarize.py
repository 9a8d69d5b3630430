"""What the estimate tells of the peak: its moment, and the precision of the weights."""

from __future__ import annotations

from typing import Any

import pytest

from graphmem.answering import summarize as summarizing
from graphmem.answering.summarize import summarize
from graphmem.devices import described_device
from graphmem.replay import replay
from graphmem.runtimes.base import Runs
from graphmem.runtimes.pytorch import default_allocator
from graphmem.trace import Category, Trace, TraceBuilder
from graphmem.units import GIB, MIB


def test_the_peak_is_told_where_reserved_memory_is_fullest_not_where_it_grew_last() -> None:
    builder = TraceBuilder("hand-made")
    forward = builder.operator("activations", phase=builder.phase(1, "forward"))
    step = builder.operator("step", phase=builder.phase(1, "optimizer"))
    again = builder.operator("again", phase=builder.phase(2, "forward"))
    builder.free(builder.alloc(100 * MIB, forward, Category.ACTIVATION), step)
    builder.free(builder.alloc(MIB // 2, step), step)  # takes a segment of its own: the last growth
    builder.alloc(100 * MIB, again, Category.ACTIVATION)
    trace = builder.build()
    estimate = summarize(
        trace,
        Runs(replay(trace, default_allocator("", None, (2, 13)))),
        described_device("a card", (9, 0), GIB, 132, 2048),
        model="",
        runtime="pytorch",
        allocator="",
        step="",
    )
    assert estimate.reserved == 102 * MIB
    assert estimate.moment.operator == "again"
    assert estimate.breakdown["ACTIVATION"] == 100 * MIB
    assert estimate.breakdown["FRAGMENTATION"] == 2 * MIB
    assert sum(estimate.breakdown.values()) == estimate.device
    assert estimate.last_growth is not None
    assert estimate.last_growth.operator == "step"


def test_what_lives_at_the_peak_is_looked_up_once_for_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = TraceBuilder("hand-made")
    forward = builder.operator("activations", phase=builder.phase(1, "forward"))
    builder.alloc(3 * MIB, forward, Category.ACTIVATION)
    trace, looked = builder.build(), list[int]()
    found = summarizing._live_on_device

    def noted(trace: Trace, position: int) -> Any:
        looked.append(position)
        return found(trace, position)

    monkeypatch.setattr(summarizing, "_live_on_device", noted)
    made = []
    for conf in ("", "roundup_power2_divisions:4", "max_split_size_mb:64"):
        runs = Runs(replay(trace, default_allocator(conf, None, (2, 13))))
        card = described_device("a card", (9, 0), GIB, 132, 2048)
        made.append(summarize(trace, runs, card, model="", runtime="pytorch", allocator=conf, step=""))
    assert looked == [0, 0, 0]  # its categories, its largest, those held by lines
    assert {one.breakdown["ACTIVATION"] for one in made} == {3 * MIB}
    assert {len(one.top) for one in made} == {1}


def test_the_step_names_the_precision_that_the_weights_have() -> None:
    torch = pytest.importorskip("torch")
    import graphmem

    half = torch.nn.Linear(4, 4).to(torch.bfloat16)
    example = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert "bf16 weights" in graphmem.analyze(half, example).step
    mixed = torch.nn.Sequential(torch.nn.Linear(8, 4), half)
    step = graphmem.Inference(amp="bf16")
    assert "fp32 and bf16 weights" in graphmem.analyze(mixed, torch.zeros(2, 8), training=step).step
    assert "fp32 weights" in graphmem.analyze(torch.nn.Linear(4, 4), torch.zeros(2, 4)).step
