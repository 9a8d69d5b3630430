"""Execution order and shapes against what ONNX Runtime 1.31.1 really executed (recorded profiles)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from graphmem.graph.order import execution_order
from graphmem.sources.onnx_file import load_onnx
from tests import places
from tests.support import onnx_samples as samples

GOLDEN = places.ONNXRUNTIME / "ort_planner.json.gz"


def unoptimised_cases() -> list[dict[str, Any]]:
    with gzip.open(GOLDEN, "rt") as file:
        return [case for case in json.load(file)["cases"] if "exec_order" in case]


@pytest.mark.parametrize("case", unoptimised_cases(), ids=lambda c: c["model"])
def test_execution_order_and_shapes(tmp_path: Path, case: dict[str, Any]) -> None:
    graph = load_onnx(samples.unpack(case["model"], tmp_path), batch=case["batch"])
    rows = case["exec_order"]
    assert [node.name for node in graph.nodes] == case["index_order"]
    assert [graph.nodes[index].name for index in execution_order(graph.nodes)] == [row[0] for row in rows]
    for _, inputs, outputs, shapes in rows:
        assert all(name in graph.tensors for name in inputs if name)
        assert [list(graph.tensors[name].shape) for name in outputs] == shapes
    assert [name for name in graph.initializers if name not in case["initializers"]] == []
