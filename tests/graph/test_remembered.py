"""What rules said of a node is taken again for an equal one, and a session's plan for the same graph at another size;
either way every size is as if it were asked alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper, shape_inference

from graphmem.graph import remembered
from graphmem.runtimes.onnxruntime.plan.session import SessionPlans, SessionSettings, plan_session
from graphmem.sources.onnx_file import OnnxFile, load_onnx, read_onnx
from tests.support import onnx_samples
from tests.support.onnx_samples import constant, model, save, value


@pytest.mark.parametrize("name", onnx_samples.REAL_MODELS)
@pytest.mark.parametrize("level", [None, "all"])
def test_a_file_bound_again_is_as_if_it_were_bound_first(name: str, level: str | None, tmp_path: Path) -> None:
    file = read_onnx(onnx_samples.unpack(name, tmp_path), level)
    plans, settings = SessionPlans(), SessionSettings()
    for batch in (1, 3, 8, 1):
        again, alone = file.bind(batch=batch), replace(file).bind(batch=batch)
        assert again == alone
        assert plans.of(again, settings) == plan_session(alone, settings)


def test_one_plan_serves_all_sizes_of_a_file(tmp_path: Path) -> None:
    file, plans = read_onnx(onnx_samples.unpack("resnet50", tmp_path), "all"), SessionPlans()
    first = plans.of(file.bind(batch=1), SessionSettings())
    assert plans.of(file.bind(batch=64), SessionSettings()) is first
    assert plans.of(file.bind(batch=64), SessionSettings(provider="cpu")) is not first
    assert plans.of(read_onnx(tmp_path / "resnet50.onnx").bind(batch=64), SessionSettings()) is not first


def test_a_layer_that_is_like_another_asks_no_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"x{number}" for number in range(9)]
    nodes = [helper.make_node("Relu", [one], [two]) for one, two in itertools.pairwise(names)]
    file = _file(tmp_path, nodes, value("x8", None))
    asked: list[str] = []
    rule: Any = shape_inference.infer_node_outputs

    def noted(schema: Any, node: onnx.NodeProto, *rest: Any) -> Any:
        asked.append(node.op_type)
        return rule(schema, node, *rest)

    monkeypatch.setattr(shape_inference, "infer_node_outputs", noted)
    for batch in (2, 3, 2):
        assert file.bind(batch=batch).tensors["x8"].shape == (batch, 4)
    assert len(asked) == 2


def test_what_differs_in_an_attribute_an_input_or_a_number_is_asked(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x0", "two"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0, 2]),
        helper.make_node("Transpose", ["a"], ["c"], perm=[2, 1, 0]),
        helper.make_node("Reshape", ["x0", "flat"], ["d"]),
        helper.make_node("Reshape", ["x0", "upright"], ["e"]),
        helper.make_node("MatMul", ["d", "e"], ["outer"]),
        helper.make_node("MatMul", ["e", "d"], ["inner"]),
        helper.make_node("Concat", ["b", "b"], ["f"], axis=0),
    ]
    constants = [constant("two", [2]), constant("flat", [1, -1]), constant("upright", [-1, 1])]
    tensors = _file(tmp_path, nodes, value("f", None), constants).bind(batch=3).tensors
    shapes = {name: spec.shape for name, spec in tensors.items()}
    assert (shapes["b"], shapes["c"], shapes["f"]) == ((4, 3, 1), (1, 4, 3), (8, 3, 1))
    assert (shapes["outer"], shapes["inner"]) == ((1, 1), (12, 12))


def test_sizes_that_data_decides_are_asked_each_time(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x0"], ["found"])]
    file = _file(tmp_path, nodes, value("found", None, TensorProto.INT64))
    whole, half = (file.bind(batch=4, selected=share).tensors["found"].shape for share in (None, 0.5))
    assert (whole, half) == ((2, 16), (2, 8))


def test_answers_are_forgotten_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 3)
    path = save(
        model([helper.make_node("Relu", ["x0"], ["y"])], [value("x0", ["batch", 4])], [value("y", None)]), tmp_path
    )
    file = read_onnx(path)
    for batch in range(1, 9):
        assert file.bind(batch=batch) == load_onnx(path, batch=batch)


def _file(directory: Path, nodes: list[onnx.NodeProto], output: onnx.ValueInfoProto, constants: Any = ()) -> OnnxFile:
    return read_onnx(save(model(nodes, [value("x0", ["batch", 4])], [output], constants), directory))
