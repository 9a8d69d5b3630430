"""Predicted shapes against the installed ONNX Runtime: every intermediate tensor, run for real on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from graphmem.sources.onnx_file import load_onnx
from tests.sources.test_onnx_fuzz import many_operators
from tests.support import onnx_samples as samples

onnxruntime = pytest.importorskip("onnxruntime")
DTYPES = {"float32": np.float32, "int64": np.int64}


def model_file(name: str, directory: Path) -> Path:
    if name in samples.REAL_MODELS:
        return samples.unpack(name, directory)
    made = {"dynamic_reshape": samples.dynamic_reshape, "many_operators": many_operators}[name]()
    return samples.save(made, directory)


@pytest.mark.parametrize("name", ["bert_mini", "unet", "dynamic_reshape", "many_operators"])
def test_every_tensor_has_the_predicted_shape(tmp_path: Path, name: str) -> None:
    path = model_file(name, tmp_path)
    graph = load_onnx(path, batch=2)
    proto = onnx.load(path)
    names = [output for node in graph.nodes for output in node.outputs]
    proto.graph.ClearField("output")
    proto.graph.output.extend(onnx.ValueInfoProto(name=output) for output in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for name in graph.inputs:
        spec = graph.tensors[name]
        shape: Any = spec.shape  # the sample has no symbolic size
        feeds[name] = np.ones(shape, DTYPES[spec.dtype])
    results = dict(zip(names, session.run(names, feeds), strict=True))
    assert {n: (r.shape, str(r.dtype)) for n, r in results.items()} == {
        n: (graph.tensors[n].shape, graph.tensors[n].dtype) for n in names
    }
    assert {n: r.nbytes for n, r in results.items()} == {n: graph.tensors[n].nbytes for n in names}
