"""Recorded CPU sessions of ONNX Runtime 1.31.1: every allocation of every run, and the arena's statistics after it.

The graphs are those the recorded sessions executed, optimized and without weights, so that neither the installed
onnxruntime nor the vector width of this machine matters.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphmem.allocators.onnxruntime_arena import ArenaConfig, ExtendStrategy
from graphmem.replay import replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import Options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.runtimes.onnxruntime.plan.session import SessionSettings
from graphmem.trace import EventKind, Trace
from tests import places
from tests.support.onnx_sessions import executed_graph

GOLDEN = places.ONNXRUNTIME
Event = tuple[str, int]


def read(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(gzip.decompress((GOLDEN / name).read_bytes()))["cases"]
    return cases


def planned(case: dict[str, Any], runs: int, **settings: Any) -> Trace:
    graph = executed_graph(case["model"], case["level"], case["batch"])
    # the recordings' models hold one repeating pattern: weights of one shape are equal, and so are packed once
    graph = replace(graph, contents={name: str(graph.tensors[name]) for name in graph.initializers})
    session = SessionSettings(provider="cpu", **settings)
    return plan([[graph] * runs], Options(session=session)).trace


def events_of(trace: Trace) -> dict[int, list[Event]]:
    """(kind, bytes) of every event by run, 0 being loading; what one kernel frees is sorted."""
    reserved, born = reserved_allocations(trace, Options(session=SessionSettings(provider="cpu"))), 0
    runs: dict[int, list[Event]] = {}
    for event in trace.events():
        size = trace.storages[event.subject].bytes if event.subject >= 0 else 0
        if not size or event.kind not in (EventKind.ALLOC, EventKind.FREE):
            continue
        kind = "free"
        if event.kind == EventKind.ALLOC:
            kind = "reserve" if born in reserved else "alloc"
            born += 1
        runs.setdefault(trace.phases[trace.operators[event.operator].phase].iteration, []).append((kind, size))
    return {run: with_sorted_frees(events) for run, events in runs.items()}


def with_sorted_frees(events: list[Event]) -> list[Event]:
    done: list[Event] = []
    frees: list[Event] = []
    for event in events:
        if event[0] == "free":
            frees.append(event)
            continue
        done += [*sorted(frees), event]
        frees = []
    return done + sorted(frees)


@pytest.mark.parametrize("case", read("ort_planner.json.gz"), ids=lambda case: f"{case['model']}-{case['level']}")
def test_planner(case: dict[str, Any]) -> None:
    runs = events_of(planned(case, 2))
    for run in (1, 2):
        recorded = [(kind, size) for kind, size in case[f"run{run}_events"]]
        found = runs[run]
        assert sum(kind == "free" for kind, _ in found) == sum(kind == "alloc" for kind, _ in found)
        allocated = [event for event in found if event[0] == "alloc"]
        assert allocated == [event for event in recorded if event[0] == "alloc"]
        outputs = Counter(found) - Counter(recorded)  # the recording ends before the caller drops the outputs
        assert sum(outputs.values()) <= 1
    assert ("alloc", case["pattern_block"]) in runs[2]


SESSIONS = read("ort_sessions.json.gz")


def name_of(case: dict[str, Any]) -> str:
    words = [case["model"], f"b{case['batch']}", case["level"], case["mode"]]
    words += ["pattern"] * case["pattern"] + ["same"] * bool(case.get("arena")) + ["shrink"] * case.get("shrink", 0)
    return "-".join(words) + ("-device" if case.get("config") else "")


@pytest.mark.parametrize("case", [case for case in SESSIONS if case["mode"] == "trace"], ids=name_of)
def test_every_event(case: dict[str, Any]) -> None:
    found = events_of(planned(case, case["runs"], enable_mem_pattern=bool(case["pattern"])))
    recorded: dict[int, list[Event]] = {}
    for phase, kind, size in case["events"]:
        run = 0 if phase == "init" else int(phase.removeprefix("run").removeprefix("release"))
        recorded.setdefault(run, []).append((kind, size))
    assert found.keys() == recorded.keys()
    assert Counter(found[0]) == Counter(recorded[0])
    for run in range(1, case["runs"] + 1):
        assert found[run] == with_sorted_frees(recorded[run])


@pytest.mark.parametrize("case", [case for case in SESSIONS if case["mode"] == "arena"], ids=name_of)
def test_statistics(case: dict[str, Any]) -> None:
    stats = case["stats"]
    shrink = bool(case.get("shrink"))
    trace = planned(case, case["runs"], enable_mem_pattern=bool(case["pattern"]), enable_memory_arena_shrinkage=shrink)
    if shrink:  # the recording shrinks in its last run only
        shrinks = np.flatnonzero(trace.kinds == EventKind.EMPTY_CACHE)
        trace.kinds[shrinks[:-1]] = EventKind.SYNCHRONIZE
    strategy = ExtendStrategy(case["arena"]["arena_extend_strategy"] if case.get("arena") else 0)
    options = Options(ArenaConfig(arena_extend_strategy=strategy), SessionSettings(provider="cpu"))
    allocator = default_allocator(options, reserved=reserved_allocations(trace, options))
    result = replay(trace, allocator)
    assert allocator.stats() == stats[f"run{case['runs']}_released"]
    run_of = [trace.phases[trace.operators[o].phase].iteration for o in trace.event_operators.tolist()]
    for run in range(1, case["runs"] + 1):
        last = max(index for index, number in enumerate(run_of) if number == run)
        assert int(result.reserved_bytes[last]) == stats[f"run{run}_released"]["TotalAllocated"]
        assert int(result.allocated_bytes[: last + 1].max()) <= stats[f"run{run}_released"]["MaxInUse"]
