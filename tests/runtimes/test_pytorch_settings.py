"""Settings of PyTorch's allocator that a trace cannot tell apart: one replay serves them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.base.versions import NEWEST
from graphmem.devices import device_named
from graphmem.replay import replay
from graphmem.runtimes.base import Setting
from graphmem.runtimes.pytorch.runtime import RUNTIME, PyTorchOptions
from graphmem.trace import Trace, TraceBuilder
from graphmem.units import MIB
from tests.support.examples import examples

_CONFS = (
    "max_split_size_mb:21",
    "max_split_size_mb:40",
    "max_split_size_mb:30,max_non_split_rounding_mb:25",
    "max_split_size_mb:25,large_segment_size_mb:24",
    "max_split_size_mb:64,max_non_split_rounding_mb:30",
    "max_split_size_mb:48,roundup_power2_divisions:[32:1,64:2,>:4]",
    "expandable_segments:True,max_split_size_mb:64",
    "garbage_collection_threshold:0.6,large_segment_size_mb:24",
)


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    builder = TraceBuilder("drawn")
    operator = builder.operator("drawn")
    alive: list[int] = []
    for size in draw(st.lists(st.integers(1, 70 * MIB), max_size=40)):
        alive.append(builder.alloc(size, operator))
        if len(alive) > 1 and draw(st.booleans()):
            builder.free(alive.pop(draw(st.integers(0, len(alive) - 1))), operator)
    return builder.build()


@settings(max_examples=examples(200), deadline=None)
@given(trace=_traces(), text=st.sampled_from(_CONFS))
def test_what_is_not_told_apart_is_the_same(trace: Trace, text: str) -> None:
    conf = parse_alloc_conf(text)
    rules: Any = RUNTIME.told_apart(trace, PyTorchOptions(text, conf, NEWEST))
    _, like, _ = rules
    one, other = (replay(trace, PyTorchCachingAllocator(None, it)) for it in (conf, like))
    assert one.allocated_bytes.tolist() == other.allocated_bytes.tolist()
    assert one.reserved_bytes.tolist() == other.reserved_bytes.tolist()
    assert one.segments == other.segments


@pytest.mark.parametrize(
    ("text", "is_shared"),
    [
        ("", True),
        ("max_split_size_mb:41", True),
        ("max_split_size_mb:40", False),
        ("garbage_collection_threshold:0.8", True),
        ("expandable_segments:True", False),
        ("roundup_power2_divisions:4", False),
        ("large_segment_size_mb:64", False),
    ],
)
def test_settings_that_change_nothing_share_a_replay(text: str, *, is_shared: bool) -> None:
    builder = TraceBuilder("a step")
    builder.alloc(39 * MIB, builder.operator("aten.mm"))
    trace, setting = builder.build(), Setting(device_named("T4"), NEWEST)
    first, second = (RUNTIME.run(trace, RUNTIME.parse(one, setting), setting).main for one in ("", text))
    assert (first is second) == is_shared
