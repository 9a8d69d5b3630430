"""ONNX operators that work element by element, and the activations."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphmem.sources.onnx_module.registry import OPERATORS, Call, Operator, operator

_UNARY = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan,
    "Log": torch.log, "Mish": functional.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": functional.softplus,
    "Softsign": functional.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
    "HardSwish": functional.hardswish,
}  # fmt: skip
_BINARY = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt,
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
#: Those whose PyTorch function takes tensors only.
_TENSORS_ONLY = frozenset(("And", "Or", "Xor"))


def _unary(function: Any, node: Call, x: Tensor) -> Tensor:
    result: Tensor = function(x)
    return result


def _binary(function: Any, node: Call, x: Any, y: Any) -> Tensor:
    if node.attribute("broadcast"):
        raise node.refused("it broadcasts as operator sets before 7 do; convert the file with onnx.version_converter")
    if not isinstance(x, Tensor) and function in _MIRRORED:
        x, y, function = y, x, _MIRRORED[function]
    result: Tensor = function(x, y)
    return result


#: PyTorch's comparisons take a number on the right only.
_MIRRORED = {
    torch.eq: torch.eq, torch.gt: torch.lt, torch.lt: torch.gt, torch.ge: torch.le, torch.le: torch.ge,
}  # fmt: skip

for _name, _function in _UNARY.items():
    OPERATORS[_name] = Operator(functools.partial(_unary, _function))
for _name, _function in _BINARY.items():
    OPERATORS[_name] = Operator(functools.partial(_binary, _function), elementwise=_name not in _TENSORS_ONLY)


@operator("Div", elementwise=True)
def _div(node: Call, x: Any, y: Any) -> Tensor:
    return torch.div(x, y) if node.dtype.is_floating_point else torch.div(x, y, rounding_mode="trunc")


@operator("Pow", elementwise=True)
def _pow(node: Call, x: Any, y: Any) -> Tensor:
    result: Tensor = torch.pow(x, y)
    return result.to(node.dtype)


@operator("Mod", elementwise=True)
def _mod(node: Call, x: Any, y: Any) -> Tensor:
    return torch.fmod(x, y) if node.attribute("fmod", 0) else torch.remainder(x, y)


@operator("BitShift")
def _bit_shift(node: Call, x: Tensor, y: Tensor) -> Tensor:
    return x << y if node.attribute("direction") == "LEFT" else x >> y


@operator("Max")
def _max(node: Call, *tensors: Tensor) -> Tensor:
    return functools.reduce(torch.maximum, tensors)


@operator("Min")
def _min(node: Call, *tensors: Tensor) -> Tensor:
    return functools.reduce(torch.minimum, tensors)


@operator("Sum")
def _sum(node: Call, *tensors: Tensor) -> Tensor:
    return functools.reduce(torch.add, tensors)


@operator("Mean")
def _mean(node: Call, *tensors: Tensor) -> Tensor:
    return functools.reduce(torch.add, tensors) / len(tensors)


@operator("Where", elementwise=True)
def _where(node: Call, condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(condition, x, y)


@operator("Clip", known=(1, 2))
def _clip(node: Call, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    bounds = [_bound(node, name, value) for name, value in (("min", low), ("max", high))]
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(x, low, high)
    return x if bounds == [None, None] else torch.clamp(x, *bounds)


def _bound(node: Call, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    found = node.setting(name, value)
    return found[0] if isinstance(found, list) else found


@operator("Cast")
def _cast(node: Call, x: Tensor) -> Tensor:
    return x.to(node.dtype)


@operator("CastLike")
def _cast_like(node: Call, x: Tensor, like: Tensor) -> Tensor:
    return x.to(node.dtype)


@operator("IsInf")
def _is_inf(node: Call, x: Tensor) -> Tensor:
    positive, negative = node.attribute("detect_positive", 1), node.attribute("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    return torch.isposinf(x) if positive else torch.isneginf(x) if negative else torch.zeros_like(x, dtype=torch.bool)


@operator("Identity")
def _identity(node: Call, x: Tensor) -> Tensor:
    return x


@operator("Dropout", known=(1, 2))
def _dropout(node: Call, x: Tensor, ratio: Any = None, training: Any = None) -> Any:
    """Of operator set 12 on a Dropout says itself whether it trains; before it was an inference operator."""
    active = node.training and training is not None and bool(node.setting("training_mode", training))
    share = node.setting("ratio", ratio, 0.5)
    if node.wants(1):
        if active:
            return torch.native_dropout(x, share, True)
        return x, torch.ones_like(x, dtype=torch.bool)
    return functional.dropout(x, share, True) if active else x


# --- activations ------------------------------------------------------------------------------------------------------


@operator("Elu")
def _elu(node: Call, x: Tensor) -> Tensor:
    return functional.elu(x, node.attribute("alpha", 1.0))


@operator("Celu")
def _celu(node: Call, x: Tensor) -> Tensor:
    return functional.celu(x, node.attribute("alpha", 1.0))


@operator("LeakyRelu")
def _leaky_relu(node: Call, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, node.attribute("alpha", 0.01))


@operator("ThresholdedRelu")
def _thresholded_relu(node: Call, x: Tensor) -> Tensor:
    return functional.threshold(x, node.attribute("alpha", 1.0), 0.0)


@operator("Selu")
def _selu(node: Call, x: Tensor) -> Tensor:
    alpha, gamma = node.attribute("alpha"), node.attribute("gamma")
    if alpha is None and gamma is None:
        return functional.selu(x)
    return (gamma or 1.0507009873554805) * functional.elu(x, alpha or 1.6732632423543772)


@operator("PRelu")
def _prelu(node: Call, x: Tensor, slope: Tensor) -> Tensor:
    channels = x.shape[1] if x.dim() > 1 else 1
    of_channels = slope.numel() == channels and slope.dim() == x.dim() - 1 and slope.shape[0] == channels
    if slope.numel() == 1 or of_channels:
        return functional.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@operator("HardSigmoid")
def _hard_sigmoid(node: Call, x: Tensor) -> Tensor:
    alpha, beta = node.attribute("alpha", 0.2), node.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return functional.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0, 1)


@operator("Gelu")
def _gelu(node: Call, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=node.attribute("approximate", "none"))


@operator("Swish")
def _swish(node: Call, x: Tensor) -> Tensor:
    alpha = node.attribute("alpha", 1.0)
    return functional.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


@operator("Softmax", "LogSoftmax")
def _softmax(node: Call, x: Tensor) -> Tensor:
    """Before operator set 13 all dimensions from the axis on are one."""
    function = functional.softmax if node.node.op_type == "Softmax" else functional.log_softmax
    if node.opset >= 13:
        return function(x, node.attribute("axis", -1))
    axis = node.attribute("axis", 1) % max(x.dim(), 1)
    if axis == x.dim() - 1:
        return function(x, -1)
    return function(x.flatten(axis), -1).reshape(x.shape)
