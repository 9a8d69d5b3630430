"""Shapes of ONNX Runtime's own operators (``com.microsoft``), by ONNX Runtime's own Python rules where installed."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper


def symbolic_outputs(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    data: Mapping[str, onnx.TensorProto],
) -> dict[str, onnx.TypeProto]:
    """Types of the outputs of ``node`` as ``onnxruntime.tools.symbolic_shape_infer`` finds them; empty if it cannot.

    The tool's public entry writes a file when it fails, so this drives its class on a model of this one node.
    """
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    except ImportError:
        return {}
    names = list(dict.fromkeys(name for name in node.input if name))
    graph = helper.make_graph(
        [node],
        "one node",
        [onnx.ValueInfoProto(name=name, type=types[name]) for name in names if name not in data],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        [data[name] for name in names if name in data],
    )
    single = helper.make_model(graph, opset_imports=list(model.opset_import))
    try:
        inference = SymbolicShapeInference(2**31 - 1, auto_merge=False, guess_output_rank=False, verbose=0)
        inference._preprocess(single)
        while inference.run_:
            inference._infer_impl()
        inference._update_output_from_vi()
        inferred = inference.out_mp_.graph
    except Exception:  # its rules assert, index and divide as they please; unknown is a safe answer
        return {}
    return {value.name: value.type for value in (*inferred.value_info, *inferred.output) if value.name in node.output}
