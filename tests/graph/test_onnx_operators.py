"""ONNX's own test cases, one operator each: the predicted shape is that of the expected output, or a clear refusal."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from graphmem.errors import GraphmemError
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import load_onnx
from tests.support import onnx_samples as samples
from tests.support.examples import parts

#: Operators whose data decides how much they return: at most what is predicted.
SELECTING = ("test_nonmaxsuppression", "test_unique", "test_nonzero")


def with_known_inputs(case: Any) -> onnx.ModelProto:
    """The case's model with its small numeric inputs as initializers, so that shapes given as inputs are known."""
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    for value, array in zip(proto.graph.input, case.data_sets[0][0], strict=False):
        if isinstance(array, np.ndarray) and array.nbytes <= 1024 and array.dtype.kind in "iufb":
            proto.graph.initializer.append(numpy_helper.from_array(array, value.name))
    return proto


def shape_of(data: Any) -> tuple[Any, ...]:
    """The shape of an expected output, of a sequence those of its tensors; types numpy lacks come as protobuf."""
    if isinstance(data, list):
        return tuple(shape_of(one) for one in data)
    return tuple(data.dims) if isinstance(data, onnx.TensorProto) else np.shape(data)


def _bounds(found: tuple[Any, ...], true: tuple[Any, ...]) -> bool:
    return len(found) == len(true) and all(most >= size for most, size in zip(found, true, strict=True))


@pytest.mark.parametrize("part", parts(6))
def test_the_shape_of_every_operator(part: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute with overflow on purpose
        from onnx.backend.test.case.node import collect_testcases

        cases = [case for case in collect_testcases(None) if case.data_sets][part::6]
    path = tmp_path / "case.onnx"
    wrong, planned = {}, 0
    for case in cases:
        proto = with_known_inputs(case)
        path.write_bytes(proto.SerializeToString())
        try:
            graph = load_onnx(path)
            plan([[graph]])
        except GraphmemError:
            continue
        planned += 1
        expected = {v.name: d for v, d in zip(proto.graph.output, case.data_sets[0][1], strict=True)}
        specs = {name: graph.tensors[name] for name in expected}
        found = {name: spec.shape if spec.items is None else spec.items for name, spec in specs.items()}
        true = {name: shape_of(data) for name, data in expected.items()}
        is_bound = case.name.startswith(SELECTING) and all(_bounds(found[name], shape) for name, shape in true.items())
        if found != true and not is_bound:
            wrong[case.name] = found
    assert not wrong, wrong
    assert planned > 0.9 * len(cases)


def test_what_scikit_learn_scales_keeps_its_shape(tmp_path: Path) -> None:
    scaler = helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[0.0], scale=[2.0])
    product = helper.make_node("MatMul", ["s", "w"], ["y"])
    ends = [samples.value("x", ["batch", 4])], [samples.value("y", None)]
    made = samples.model([scaler, product], *ends, [samples.weights("w", (4, 8))])
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    assert load_onnx(samples.save(made, tmp_path), batch=3, level="all").tensors["y"].shape == (3, 8)
