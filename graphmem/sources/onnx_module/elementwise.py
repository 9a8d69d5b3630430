"""ONNX operators that work element by element, and the activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from graphmem.sources.onnx_module.registry import Call, Function, Setting, operator, operators

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
    "GreaterOrEqual": torch.ge, "LessOrEqual": torch.le, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
_BINARY_OF_TENSORS = {"And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor}
#: PyTorch's comparisons take a number on the right only.
_MIRRORED = {
    torch.eq: torch.eq, torch.gt: torch.lt, torch.lt: torch.gt, torch.ge: torch.le, torch.le: torch.ge,
}  # fmt: skip


def _unary(function: Callable[[Tensor], Tensor]) -> Function:
    return lambda node, x: function(x)


def _binary(function: Callable[..., Tensor]) -> Function:
    return functools.partial(_of_both, function)


def _of_both(function: Callable[..., Tensor], node: Call, x: Tensor | float, y: Tensor | float) -> Tensor:
    if node.attribute("broadcast", 0):
        raise node.refused("it broadcasts as operator sets before 7 do; convert the file with onnx.version_converter")
    if not isinstance(x, Tensor) and function in _MIRRORED:
        return _MIRRORED[function](y, x)
    return function(x, y)


operators({name: _unary(function) for name, function in _UNARY.items()})
operators({name: _binary(function) for name, function in _BINARY.items()}, elementwise=True)
operators({name: _binary(function) for name, function in _BINARY_OF_TENSORS.items()})
operators(
    {
        "Div": lambda node, x, y: (
            torch.div(x, y) if node.dtype.is_floating_point else torch.div(x, y, rounding_mode="trunc")
        ),
        "Pow": lambda node, x, y: torch.pow(x, y).to(node.dtype),
        "Mod": lambda node, x, y: torch.fmod(x, y) if node.attribute("fmod", 0) else torch.remainder(x, y),
        "Where": lambda node, condition, x, y: torch.where(condition, x, y),
    },
    elementwise=True,
)
operators(
    {
        "BitShift": lambda node, x, y: x << y if node.attribute("direction", "") == "LEFT" else x >> y,
        "Max": lambda node, *tensors: functools.reduce(torch.maximum, tensors),
        "Min": lambda node, *tensors: functools.reduce(torch.minimum, tensors),
        "Sum": lambda node, *tensors: functools.reduce(torch.add, tensors),
        "Mean": lambda node, *tensors: functools.reduce(torch.add, tensors) / len(tensors),
        "Cast": lambda node, x: x.to(node.dtype),
        "CastLike": lambda node, x, like: x.to(node.dtype),
        "Identity": lambda node, x: x,
        "Elu": lambda node, x: functional.elu(x, node.attribute("alpha", 1.0)),
        "Celu": lambda node, x: functional.celu(x, node.attribute("alpha", 1.0)),
        "LeakyRelu": lambda node, x: functional.leaky_relu(x, node.attribute("alpha", 0.01)),
        "ThresholdedRelu": lambda node, x: functional.threshold(x, node.attribute("alpha", 1.0), 0.0),
        "Gelu": lambda node, x: functional.gelu(x, approximate=node.attribute("approximate", "none")),
    }
)


@operator("Clip", known=(1, 2))
def _clip(node: Call, x: Tensor, low: Setting = None, high: Setting = None) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(x, low, high)
    bounds = node.number("min", low), node.number("max", high)
    return x if bounds == (None, None) else torch.clamp(x, *bounds)


@operator("IsInf")
def _is_inf(node: Call, x: Tensor) -> Tensor:
    positive, negative = node.attribute("detect_positive", 1), node.attribute("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    return torch.isposinf(x) if positive else torch.isneginf(x) if negative else torch.zeros_like(x, dtype=torch.bool)


@operator("Dropout", known=(1, 2))
def _dropout(node: Call, x: Tensor, ratio: Setting = None, training: Setting = None) -> Tensor | tuple[Tensor, Tensor]:
    """Of operator set 12 on a Dropout says itself whether it trains; before it was an inference operator."""
    active = node.training and training is not None and bool(node.number("training_mode", training))
    share = node.number("ratio", ratio, 0.5) or 0.0
    if not node.wants(1):
        return functional.dropout(x, share, True) if active else x
    if active:
        return torch.native_dropout(x, share, True)
    return x, torch.ones_like(x, dtype=torch.bool)


# --- activations ------------------------------------------------------------------------------------------------------


@operator("Selu")
def _selu(node: Call, x: Tensor) -> Tensor:
    alpha, gamma = node.attribute("alpha", None), node.attribute("gamma", None)
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
