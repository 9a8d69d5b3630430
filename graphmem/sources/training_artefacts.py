"""The files of ONNX Runtime's on-device training, whose operators no wheel since its training build 1.19.2 has."""

from __future__ import annotations

import math

import onnx

from graphmem.errors import SourceError
from graphmem.units import format_bytes

#: Besides gradients (``ReluGrad`` ...) the operators that ``onnxruntime.training.artifacts`` writes (1.19.2).
_OPERATORS = frozenset((
    "InPlaceAccumulator", "InPlaceAccumulatorV2", "AdamWOptimizer", "SGDOptimizerV2", "BatchNormInternal",
    "SoftmaxCrossEntropyLossInternal", "ReduceAllL2",
))  # fmt: skip
#: The input beside which a parameter's gradient is summed.
_GRADIENT = "_grad.accumulation.buffer"


def refuse_training_artefact(model: onnx.ModelProto, name: str) -> None:
    """Raise :class:`~graphmem.errors.SourceError` for a graph of training, with the bytes that are known of it."""
    found = {node.op_type for node in model.graph.node if node.domain == "com.microsoft"}
    found = {operator for operator in found if operator in _OPERATORS or operator.endswith("Grad")}
    if not found:
        return
    size = sum(_bytes(value) for value in model.graph.input if value.name.endswith(_GRADIENT))
    text = format_bytes(size)
    known = f"; what it trains takes {text}, gradients {text}, AdamW's moments twice that, activations come on top"
    raise SourceError(
        f"{name} is a file of ONNX Runtime's on-device training ({', '.join(sorted(found)[:3])}), which graphmem does "
        f"not plan and no wheel newer than onnxruntime-training 1.19.2 runs{known if size else ''}; analyse the model "
        "that it was made from with --training"
    )


def _bytes(value: onnx.ValueInfoProto) -> int:
    kind = value.type.tensor_type
    item = int(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize)
    return int(math.prod(dimension.dim_value for dimension in kind.shape.dim)) * item
