"""Ten exported architectures in real CPU sessions of ONNX Runtime 1.31.1: the arena after every run, to the byte."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

from graphmem.replay import replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import Options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.runtimes.onnxruntime.plan.session import SessionSettings
from graphmem.sources.onnx_file import OnnxFile
from tests import places
from tests.support.onnx_sessions import executed_file

RECORDED = places.ONNXRUNTIME / "exports.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))["cases"]
CPU = Options(session=SessionSettings(provider="cpu"))


@cache
def file_of(name: str, level: str) -> OnnxFile:
    return executed_file(name, level)


def name_of(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['level']}-{'-'.join(map(str, case['batches']))}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_arena_after_every_run(case: dict[str, Any]) -> None:
    file = file_of(case["model"], case["level"])
    trace = plan([[file.bind(batch=batch) for batch in case["batches"]]], CPU).trace
    allocator = default_allocator(CPU, reserved=reserved_allocations(trace, CPU))
    result = replay(trace, allocator)
    run_of = [trace.phases[trace.operators[o].phase].iteration for o in trace.event_operators.tolist()]
    last = {run: position for position, run in enumerate(run_of)}
    found, recorded = [], []
    peak = 0
    for run, stats in enumerate(case["stats"]):
        end = last.get(run, -1)
        peak = max(peak, int(result.allocated_bytes[: end + 1].max(initial=0)))
        found.append((int(result.reserved_bytes[end]), int(result.allocated_bytes[end]), peak))
        recorded.append((stats["TotalAllocated"], stats["InUse"], stats["MaxInUse"]))
    assert found == recorded
    assert {key: allocator.stats()[key] for key in case["stats"][-1]} == case["stats"][-1]
