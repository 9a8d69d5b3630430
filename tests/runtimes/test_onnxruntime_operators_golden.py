"""What the CPU kernels of 1.31.1 allocate in onnx's own test cases, alone and between two operators that allocate.

Recorded by ``tests/oracles/onnxruntime/record_operators.py``. Operators that differ are known; the list may shrink.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graphmem.errors import GraphmemError
from graphmem.runtimes.onnxruntime.arenas import reserved_allocations
from graphmem.runtimes.onnxruntime.options import Options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.runtimes.onnxruntime.plan.session import SessionSettings
from graphmem.sources.onnx_file import read_onnx
from graphmem.trace import EventKind, Trace
from tests import places

sys.path.insert(0, str(places.ROOT / "tests" / "oracles" / "onnxruntime"))
from record_operators import cases, prepared

RECORDED: dict[str, dict[str, list[list[Any]]]] = json.loads(
    gzip.decompress((places.ONNXRUNTIME / "operators.json.gz").read_bytes())
)["cases"]
#: First operator of the cases that differ: working buffers without a rule, or a wrong shape by onnx (STFT).
KNOWN = {
    "Attention", "BatchNormalization", "DFT", "DeformConv", "STFT",
    "Resize",  # antialias
    "Shape",  # twelve expanded Attention functions: one tensor of 8 bytes that nobody reads
}  # fmt: skip
#: Data decides how much these return, and the most is planned.
BOUNDED = {"Compress", "NonMaxSuppression", "NonZero", "Unique"}
CPU = Options(session=SessionSettings(provider="cpu"))


def allocations(trace: Trace) -> Counter[tuple[int, bool, int]]:
    """How often each (run, reserved, bytes) is allocated."""
    reserved = reserved_allocations(trace, CPU)
    found: list[tuple[int, bool, int]] = []
    for event in trace.events():
        if event.kind == EventKind.ALLOC and trace.storages[event.subject].bytes:
            run = trace.phases[trace.operators[event.operator].phase].iteration
            found.append((run, len(found) in reserved, trace.storages[event.subject].bytes))
    return Counter(found)


def recorded(rows: list[list[Any]]) -> Counter[tuple[int, bool, int]]:
    return Counter({(run, bool(reserved), size): count for run, reserved, size, count in rows})


def bytes_of(counted: Counter[tuple[int, bool, int]]) -> int:
    return sum(size * count for (_, _, size), count in counted.items())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "between"])
def test_every_operator(way: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "case.onnx"
    equal, refused, wrong = 0, 0, set()
    for case in cases():
        if case.name not in RECORDED[way]:
            continue
        proto, feeds = prepared(case, way == "between")
        path.write_bytes(proto.SerializeToString())
        try:
            file = read_onnx(path, "disabled")
            graph = file.bind(input_shapes={spec.name: feeds[spec.name].shape for spec in file.declared})
            trace = plan([[graph, graph]], CPU).trace
        except GraphmemError:
            refused += 1
            continue
        ours, theirs = allocations(trace), recorded(RECORDED[way][case.name])
        operator = case.model.graph.node[0].op_type
        if ours == theirs:
            equal += 1
        elif operator not in BOUNDED or bytes_of(ours) < bytes_of(theirs):
            wrong.add(operator)
    assert wrong <= KNOWN
    assert equal > 1150
    assert refused < 80
