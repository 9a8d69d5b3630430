"""Files of ONNX Runtime's on-device training end in one line that tells what is known of them."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from graphmem.errors import SourceError
from graphmem.sources.training_artefacts import refuse_training_artefact


def model(*nodes: onnx.NodeProto, inputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    return helper.make_model(helper.make_graph(list(nodes), "g", values, []))


def test_a_training_model_is_named_with_its_parameters() -> None:
    nodes = [helper.make_node(kind, [], ["y"], domain="com.microsoft") for kind in ("ReluGrad", "InPlaceAccumulatorV2")]
    shapes = {"x": (16, 64), "w": (64, 32), "w_grad.accumulation.buffer": (64, 32), "b_grad.accumulation.buffer": (32,)}
    with pytest.raises(SourceError, match=r"InPlaceAccumulatorV2, ReluGrad.*takes 8\.12 KiB, gradients 8\.12 KiB"):
        refuse_training_artefact(model(*nodes, inputs=shapes), "training_model.onnx")


def test_an_optimizer_s_model_is_named() -> None:
    node = helper.make_node("AdamWOptimizer", [], ["y"], domain="com.microsoft")
    with pytest.raises(SourceError, match="AdamWOptimizer") as refused:
        refuse_training_artefact(model(node, inputs={}), "optimizer_model.onnx")
    assert "takes" not in str(refused.value)


def test_other_models_pass() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("FusedGemm", ["y"], ["z"], domain="com.microsoft"),
    ]
    refuse_training_artefact(model(*nodes, inputs={"x": (2,)}), "model.onnx")
