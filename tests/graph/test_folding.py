"""Values computed with numpy beside those of ONNX's reference implementation, on ONNX's own test cases."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from graphmem.graph import folding

RULES = sorted({*folding._WITH_NUMPY, *folding._BY_ELEMENT})


@cache
def cases() -> dict[str, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = defaultdict(list)
        for case in collect_testcases(None):
            if case.data_sets and len(case.model.graph.node) == 1:
                found[case.model.graph.node[0].op_type].append(case)
        return found


@pytest.mark.parametrize("operator", RULES)
def test_values_are_those_of_the_reference_implementation(operator: str) -> None:
    held = 0
    for case in cases()[operator]:
        (node,) = case.model.graph.node
        given = case.data_sets[0][0]
        arrays = [numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else np.asarray(x) for x in given]
        if len(arrays) != len(node.input) or any(x.dtype.kind not in "biuf" for x in arrays):
            continue
        quick = folding._with_numpy(node, arrays)
        if quick is None:
            continue
        opset = case.model.opset_import[0].version
        (exact,) = folding._by_reference(node, opset, arrays).values()
        assert (quick.dtype, quick.shape) == (exact.dtype, exact.shape), case.name
        np.testing.assert_array_equal(quick, exact, err_msg=case.name)
        held += 1
    assert held


OLDER: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Squeeze": ({"axes": [0, 2]}, (1, 3, 1)),
    "Unsqueeze": ({"axes": [0, 2]}, (3,)),
    "Slice": ({"axes": [1], "starts": [1], "ends": [-1]}, (2, 5)),
    "ReduceSum": ({"axes": [-1], "keepdims": 0}, (2, 5)),
}


@pytest.mark.parametrize("operator", OLDER)
def test_axes_that_are_attributes(operator: str) -> None:
    attributes, shape = OLDER[operator]
    node = onnx.helper.make_node(operator, ["x"], ["y"], **attributes)
    x = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    (exact,) = folding._by_reference(node, 9, [x]).values()
    np.testing.assert_array_equal(folding._with_numpy(node, [x]), exact, strict=True)
