"""Operators whose output's size is decided by data return what bounds them, or the share of it that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphmem import Inference, analyze
from graphmem.errors import ShapeError
from graphmem.graph.model import Graph
from graphmem.sources.onnx_file import read_onnx


def bound(
    tmp_path: Path,
    node: onnx.NodeProto,
    inputs: dict[str, tuple[int, list[int]]],
    constants: dict[str, Any] | None = None,
    selected: float | None = None,
) -> Graph:
    """A graph of one node and a ``Cast`` of its first output."""
    cast = helper.make_node("Cast", [node.output[0]], ["end"], to=TensorProto.FLOAT)
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    end = helper.make_tensor_value_info("end", TensorProto.FLOAT, None)
    values = [numpy_helper.from_array(np.array(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph([node, cast], "selects", given, [end], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "selects.onnx"
    onnx.save(model, path)
    return read_onnx(path).bind(selected=selected)


_BOXES = {"boxes": (TensorProto.FLOAT, [2, 500, 4]), "scores": (TensorProto.FLOAT, [2, 80, 500])}


@pytest.mark.parametrize(
    ("constants", "selected", "expected"),
    [
        ({"most": [100]}, None, 2 * 80 * 100),
        ({"most": [100]}, 0.25, 2 * 80 * 25),
        ({"most": [9000]}, None, 2 * 80 * 500),
        ({"most": [0]}, None, 0),
        ({}, None, 0),
    ],
)
def test_boxes_are_at_most_so_many_of_every_class(
    tmp_path: Path, constants: dict[str, Any], selected: float | None, expected: int
) -> None:
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", *constants], ["chosen"])
    graph = bound(tmp_path, node, _BOXES, constants, selected)
    assert graph.tensors["chosen"].shape == (expected, 3)
    assert graph.tensors["end"].shape == (expected, 3)


def test_without_a_known_most_all_boxes_are_taken(tmp_path: Path) -> None:
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["chosen"])
    graph = bound(tmp_path, node, {**_BOXES, "most": (TensorProto.INT64, [1])})
    assert graph.tensors["chosen"].shape == (2 * 80 * 500, 3)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (helper.make_node("NonZero", ["x"], ["chosen"]), (3, 24)),
        (helper.make_node("Unique", ["x"], ["chosen", "", "inverse"]), (24,)),
        (helper.make_node("Unique", ["x"], ["chosen"], axis=1), (2, 3, 4)),
        (helper.make_node("Compress", ["x", "mask"], ["chosen"], axis=1), (2, 2, 4)),
        (helper.make_node("Compress", ["x", "mask"], ["chosen"], axis=-1), (2, 3, 2)),
        (helper.make_node("Compress", ["x", "mask"], ["chosen"]), (2,)),
    ],
)
def test_the_bound_is_what_is_selected_from(tmp_path: Path, node: onnx.NodeProto, expected: tuple[int, ...]) -> None:
    inputs = {"x": (TensorProto.FLOAT, [2, 3, 4]), "mask": (TensorProto.BOOL, [2])}
    graph = bound(tmp_path, node, {name: inputs[name] for name in node.input})
    assert graph.tensors["chosen"].shape == expected


def test_a_known_condition_is_counted(tmp_path: Path) -> None:
    node = helper.make_node("Compress", ["x", "mask"], ["chosen"], axis=1)
    graph = bound(tmp_path, node, {"x": (TensorProto.FLOAT, [2, 3, 4])}, {"mask": [True, False, True]}, selected=0.1)
    assert graph.tensors["chosen"].shape == (2, 2, 4)


def test_what_nothing_bounds_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("Expand", ["x", "shape"], ["chosen"])
    inputs = {"x": (TensorProto.FLOAT, [1]), "shape": (TensorProto.INT64, [2])}
    with pytest.raises(ShapeError, match="depends on data"):
        bound(tmp_path, node, inputs)


def test_the_report_names_them_and_takes_a_share(tmp_path: Path) -> None:
    bound(tmp_path, helper.make_node("NonZero", ["x"], ["chosen"]), {"x": (TensorProto.FLOAT, [1000, 1000])})
    path = tmp_path / "selects.onnx"
    whole, quarter = analyze(path), analyze(path, training=Inference(data_dependent=0.25))
    assert any("NonZero chosen 2x1000000" in said for said in whole.assumptions)
    assert any("0.25 of it: NonZero chosen 2x250000" in said for said in quarter.assumptions)
    assert quarter.peak.requested_bytes < whole.peak.requested_bytes
