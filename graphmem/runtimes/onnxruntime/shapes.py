"""Shapes of ONNX Runtime's own operators (``com.microsoft``) by ONNX Runtime's own rules, where it is installed.

First the C++ rules: a session of a model of one node, all its inputs free, knows its output shapes when it is made and
computes nothing. That takes a CPU kernel; for operators without one the Python tool ``symbolic_shape_infer`` (which
needs sympy) may know the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper

if TYPE_CHECKING:
    import onnxruntime

Types = dict[str, onnx.TypeProto]
#: Beginnings of the domains ONNX Runtime knows operators of (``core/graph/constants.h``), besides ONNX's own.
_DOMAINS = ("com.microsoft", "com.ms.", "ai.onnx")
#: Operators of GPUs alone, of which a CPU build makes no session, that give what they are given; and those that halve
#: its last dimension (``core/graph/contrib_ops/diffusion_defs.cc``).
_LIKE_THEIR_INPUT = frozenset(("BiasSoftmax", "GroupNorm"))
#: Operators of ``ai.onnx.ml`` that give float32 in the shape of their input, of which a session tells no rank.
_SCALED = frozenset(("Scaler", "Normalizer", "Imputer"))
_HALF_THEIR_INPUT = frozenset(("BiasSplitGelu",))


def onnx_runtime_outputs(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    data: Mapping[str, onnx.TensorProto],
) -> tuple[Types, str]:
    """Types of the outputs of ``node`` with all dimensions known, and whose rule gave them; empty if none does."""
    if node.domain and not node.domain.startswith(_DOMAINS):
        return {}, ""
    wanted = [name for name in node.output if name]
    is_float = bool(node.input) and types[node.input[0]].tensor_type.elem_type == onnx.TensorProto.FLOAT
    if node.op_type in _LIKE_THEIR_INPUT or (node.op_type in _SCALED and is_float):
        return dict.fromkeys(wanted, types[node.input[0]]), "onnxruntime"
    if node.op_type in _HALF_THEIR_INPUT:
        return dict.fromkeys(wanted, _halved(types[node.input[0]])), "onnxruntime"
    single = _one_node_model(model, node, types, data)
    for rule, source in ((_session_outputs, "onnxruntime"), (_symbolic_outputs, "onnxruntime.tools")):
        try:
            found = rule(single)
        except Exception:  # not installed, no kernel, or a rule that asserts and indexes as it pleases: not known
            continue
        if all(name in found for name in wanted):
            return {name: found[name] for name in wanted}, source
    return {}, ""


def _halved(given: onnx.TypeProto) -> onnx.TypeProto:
    half = onnx.TypeProto()
    half.CopyFrom(given)
    last = half.tensor_type.shape.dim[-1]
    last.dim_value //= 2
    return half


def _one_node_model(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    data: Mapping[str, onnx.TensorProto],
) -> onnx.ModelProto:
    names = list(dict.fromkeys(name for name in node.input if name))
    graph = helper.make_graph(
        [node],
        "one node",
        [onnx.ValueInfoProto(name=name, type=types[name]) for name in names if name not in data],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        [data[name] for name in names if name in data],
    )
    return helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def _session_outputs(single: onnx.ModelProto) -> Types:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # a refusal is no news to the user
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        single.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        enable_fallback=0,  # the fallback prints to standard output, where graphmem's answer goes
    )
    return {out.name: _tensor_type(out) for out in session.get_outputs() if _is_known(out.shape)}


def _is_known(shape: list[Any]) -> bool:
    return bool(shape) and all(type(dimension) is int for dimension in shape)  # [] where even the rank is unknown


def _tensor_type(out: onnxruntime.NodeArg) -> onnx.TypeProto:
    name = out.type.removeprefix("tensor(").removesuffix(")")  # "tensor(float16)"
    return helper.make_tensor_type_proto(onnx.TensorProto.DataType.Value(name.upper()), out.shape)


def _symbolic_outputs(single: onnx.ModelProto) -> Types:
    """The tool's public entry writes a file into the working directory when it fails, so this drives its class."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    inference = SymbolicShapeInference(2**31 - 1, auto_merge=False, guess_output_rank=False, verbose=0)
    inference._preprocess(single)
    while inference.run_:
        inference._infer_impl()
    inference._update_output_from_vi()
    return {
        value.name: value.type
        for value in inference.out_mp_.graph.output
        if value.type.HasField("tensor_type")
        and value.type.tensor_type.HasField("shape")
        and all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }
