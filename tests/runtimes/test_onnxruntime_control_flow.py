"""Branches, loops and scans against the installed ONNX Runtime: the arena of a real session after its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from graphmem.graph.asked import Asked
from graphmem.replay import replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import parse_options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import read_onnx
from tests.support import onnx_samples as samples
from tests.support.onnx_programs import COLUMNS, ROWS, program_of, programs

pytest.importorskip("onnxruntime")
ORACLE = Path(__file__).parents[1] / "oracles" / "onnxruntime" / "serve_arena.py"
COMPARED = ("MaxInUse", "TotalAllocated", "NumAllocs")
RUNS = 3


class Oracle:
    """Real sessions in a process of their own."""

    def __init__(self) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, str(ORACLE)], **pipes)

    def arena(self, path: Path, level: str, shapes: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, int]:
        request = {"model": str(path), "level": level, "runs": [shapes] * RUNS, "values": values}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, int] = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer
        return {name: answer[name] for name in COMPARED}


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    one = Oracle()
    yield one
    assert one.process.stdin is not None
    one.process.stdin.close()
    one.process.wait(10)


def predicted(path: Path, level: str, asked: Asked) -> dict[str, int]:
    graph = read_onnx(path, level).bind(asked)
    options = parse_options(f"provider:cpu,graph_optimization_level:{level}")
    trace = plan([[graph] * RUNS], options).trace
    allocator = default_allocator(options, reserved=reserved_allocations(trace))
    replay(trace, allocator)
    return {name: allocator.stats()[name] for name in COMPARED}


@pytest.mark.parametrize("level", ["disabled", "all"])
def test_nested_programs_take_what_real_sessions_take(oracle: Oracle, tmp_path: Path, level: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs)
    def compare(steps: Any) -> None:
        model, conditions = program_of(steps)
        path = samples.save(model, tmp_path)
        shapes = {"x": (ROWS, COLUMNS), **dict.fromkeys(conditions, (1,))}
        values = {name: (float(value),) for name, value in conditions.items()}
        asked = Asked(input_values=values)
        assert predicted(path, level, asked) == oracle.arena(path, level, shapes, conditions)

    compare()
