"""ONNX's layers: convolutions, pooling, normalization, resizing, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphmem.sources.onnx_module.registry import Call, operator

Sides = list[tuple[int, int]]


def _each(node: Call, name: str, count: int, default: int = 1) -> list[int]:
    """An attribute with a number for each spatial dimension."""
    return list(node.attribute(name, (default,) * count))


def _sides(node: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Sides:
    """Padding before and after, for each spatial dimension."""
    rank = len(kernel)
    automatic = node.attribute("auto_pad", "NOTSET")
    if automatic == "NOTSET":
        pads = _each(node, "pads", 2 * rank, 0)
        return [(pads[i], pads[i + rank]) for i in range(rank)]
    if automatic == "VALID":
        return [(0, 0)] * rank
    sides = []
    for size, window, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        covered = (-(-size // stride) - 1) * stride + dilation * (window - 1) + 1
        total = max(0, covered - size)
        less, more = total // 2, total - total // 2
        sides.append((less, more) if automatic == "SAME_UPPER" else (more, less))
    return sides


def _flat(sides: Sides) -> list[int]:
    """As ``functional.pad`` takes them: the last dimension first."""
    return [pad for pair in reversed(sides) for pad in pair]


def _symmetric(sides: Sides) -> bool:
    return all(before == after for before, after in sides)


_CONVOLUTIONS: tuple[Any, ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED: tuple[Any, ...] = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def _of_rank(node: Call, functions: Sequence[Any], rank: int) -> Any:
    if not 1 <= rank <= len(functions):
        raise node.refused(f"PyTorch has none with {rank} spatial dimensions")
    return functions[rank - 1]


@operator("Conv")
def _conv(node: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = _each(node, "strides", rank), _each(node, "dilations", rank)
    sides = _sides(node, x, weight.shape[2:], strides, dilations)
    padding = [before for before, _ in sides]
    if not _symmetric(sides):
        x, padding = functional.pad(x, _flat(sides)), [0] * rank
    function = _of_rank(node, _CONVOLUTIONS, rank)
    result: Tensor = function(x, weight, bias, strides, padding, dilations, node.attribute("group", 1))
    return result


@operator("ConvTranspose")
def _conv_transpose(node: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = _each(node, "strides", rank), _each(node, "dilations", rank)
    extra, pads = _each(node, "output_padding", rank, 0), _each(node, "pads", 2 * rank, 0)
    sides = [(pads[i], pads[i + rank]) for i in range(rank)]
    function = _of_rank(node, _TRANSPOSED, rank)
    group, is_given = node.attribute("group", 1), "output_shape" in node.node.attributes
    if node.attribute("auto_pad", "NOTSET") == "NOTSET" and not is_given and _symmetric(sides):
        padding = [before for before, _ in sides]
        result: Tensor = function(x, weight, bias, strides, padding, extra, group, dilations)
        return result
    whole: Tensor = function(x, weight, bias, strides, [0] * rank, [0] * rank, group, dilations)
    for i in range(rank):
        cut = whole.shape[2 + i] + extra[i] - node.shape[2 + i]
        is_upper = node.attribute("auto_pad", "NOTSET") == "SAME_UPPER"
        before = sides[i][0] if not is_given and any(pads) else cut // 2 if is_upper else cut - cut // 2
        missing = before + node.shape[2 + i] - whole.shape[2 + i]
        if missing > 0:
            whole = functional.pad(whole, [0, 0] * (rank - 1 - i) + [0, missing])
        whole = whole.narrow(2 + i, before, node.shape[2 + i])
    return whole


# --- pooling ----------------------------------------------------------------------------------------------------------

_MAX_POOLS: tuple[Any, ...] = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGE_POOLS: tuple[Any, ...] = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


@operator("MaxPool")
def _max_pool(node: Call, x: Tensor) -> Tensor:
    if node.wants(1):
        raise node.refused("its Indices count over the whole tensor, and PyTorch's over each image")
    rank = x.dim() - 2
    kernel, strides, dilations = _each(node, "kernel_shape", rank), *(_each(node, n, rank) for n in _STEPS)
    sides = _sides(node, x, kernel, strides, dilations)
    padding = [before for before, _ in sides]
    if not _symmetric(sides) or any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        least = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, padding = functional.pad(x, _flat(sides), value=least), [0] * rank
    function = _of_rank(node, _MAX_POOLS, rank)
    result: Tensor = function(x, kernel, strides, padding, dilations, ceil_mode=bool(node.attribute("ceil_mode", 0)))
    return result


_STEPS = ("strides", "dilations")


@operator("AveragePool")
def _average_pool(node: Call, x: Tensor) -> Tensor:
    rank = x.dim() - 2
    kernel, strides, dilations = _each(node, "kernel_shape", rank), *(_each(node, n, rank) for n in _STEPS)
    if any(dilation != 1 for dilation in dilations):
        raise node.refused("PyTorch's average pooling has no dilations")
    sides, counted = _sides(node, x, kernel, strides, dilations), bool(node.attribute("count_include_pad", 0))
    padding = [before for before, _ in sides]
    ceil = bool(node.attribute("ceil_mode", 0))
    function = _of_rank(node, _AVERAGE_POOLS, rank)
    if _symmetric(sides) and all(2 * pad <= size for pad, size in zip(padding, kernel, strict=True)):
        result: Tensor = function(x, kernel, strides, padding, ceil, counted)
        return result
    means: Tensor = function(functional.pad(x, _flat(sides)), kernel, strides, 0, ceil)
    if counted:
        return means
    inside = functional.pad(torch.ones_like(x[:1, :1]), _flat(sides))
    shares: Tensor = function(inside, kernel, strides, 0, ceil)
    return means / shares


@operator("GlobalAveragePool")
def _global_average_pool(node: Call, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(node: Call, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


# --- normalization ----------------------------------------------------------------------------------------------------


@operator("BatchNormalization")
def _batch_norm(node: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
    """In training always with the batch's statistics, also where the file was exported for inference."""
    momentum, epsilon = 1 - node.attribute("momentum", 0.9), node.attribute("epsilon", 1e-5)
    if node.wants(1) and not node.training:
        raise node.refused("it gives the statistics of a training export; analyse it with --training")
    result = functional.batch_norm(x, mean, variance, scale, bias, node.training, momentum, epsilon)
    return (result, mean, variance) if node.wants(1) else result


@operator("InstanceNormalization")
def _instance_norm(node: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=node.attribute("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(node: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    shape, epsilon = x.shape[node.attribute("axis", -1) % x.dim() :], node.attribute("epsilon", 1e-5)
    scale, bias = _over(scale, shape), None if bias is None else _over(bias, shape)
    if node.wants(1) or node.wants(2):
        return torch.native_layer_norm(x, shape, scale, bias, epsilon)
    return functional.layer_norm(x, shape, scale, bias, epsilon)


def _over(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """ONNX lets a weight broadcast over the normalized dimensions."""
    return weight if weight.shape == shape else weight.expand(shape)


@operator("RMSNormalization")
def _rms_norm(node: Call, x: Tensor, scale: Tensor) -> Tensor:
    shape = x.shape[node.attribute("axis", -1) % x.dim() :]
    return functional.rms_norm(x, shape, _over(scale, shape), node.attribute("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(node: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = node.attribute("num_groups")
    if scale.shape[0] != x.shape[1]:  # one for each group, as before operator set 21
        scale, bias = (weight.repeat_interleave(x.shape[1] // groups) for weight in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, node.attribute("epsilon", 1e-5))


@operator("LRN")
def _lrn(node: Call, x: Tensor) -> Tensor:
    settings = (node.attribute("alpha", 1e-4), node.attribute("beta", 0.75), node.attribute("bias", 1.0))
    return functional.local_response_norm(x, node.attribute("size"), *settings)


# --- images -----------------------------------------------------------------------------------------------------------

_INTERPOLATIONS = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}


@operator("Resize", "Upsample", known=(1, 2, 3))
def _resize(node: Call, x: Tensor, *_: Any) -> Tensor:
    """``interpolate`` to the bound output shape. Where ONNX's coordinates are none of PyTorch's, the values would
    differ a little and the memory does not."""
    size, mode = node.shape[2:], node.attribute("mode", "nearest")
    if node.shape[:2] != tuple(x.shape[:2]):
        raise node.refused("it resizes the batch or the channels, which PyTorch's interpolate does not")
    coordinates = node.attribute("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        exact = coordinates == "half_pixel" and node.node.op_type == "Resize"
        return functional.interpolate(x, size, mode="nearest-exact" if exact else "nearest")
    name = _of_rank(node, _INTERPOLATIONS[mode], x.dim() - 2)
    if not name:
        raise node.refused(f"PyTorch interpolates {x.dim() - 2} dimensions in no {mode} mode")
    aligned, antialias = coordinates == "align_corners", bool(node.attribute("antialias", 0))
    return functional.interpolate(x, size, mode=name, align_corners=aligned, antialias=antialias)


@operator("GridSample")
def _grid_sample(node: Call, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(node.attribute("mode", "linear"), node.attribute("mode"))
    aligned = bool(node.attribute("align_corners", 0))
    return functional.grid_sample(
        x, grid, mode or "bilinear", node.attribute("padding_mode", "zeros"), align_corners=aligned
    )


# --- attention --------------------------------------------------------------------------------------------------------


_ATTENTION = {
    "is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision",
}  # fmt: skip


@operator("Attention")
def _attention(
    node: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Any:
    if node.attribute("softcap", 0.0) or node.wants(3) or lengths is not None:
        raise node.refused("its softcap, key lengths or scores are none of scaled_dot_product_attention's")
    if not node.node.attributes.keys() <= _ATTENTION:
        unknown = ", ".join(sorted(node.node.attributes.keys() - _ATTENTION))
        raise node.refused(f"its attributes {unknown} are none of scaled_dot_product_attention's")
    heads = node.attribute("q_num_heads"), node.attribute("kv_num_heads"), node.attribute("kv_num_heads")
    q, k, v = (_heads(tensor, count) for tensor, count in zip((query, key, value), heads, strict=True))
    if past_key is not None and past_value is not None:
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
    is_causal = bool(node.attribute("is_causal", 0))
    if is_causal and (mask is not None or past_key is not None):
        raise node.refused("it is causal beside a mask or a past, which scaled_dot_product_attention is not")
    made = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=node.attribute("scale"), enable_gqa=q.shape[1] != k.shape[1]
    )
    if query.dim() == 3:
        made = made.transpose(1, 2).reshape(node.shape)
    return made, k, v


def _heads(tensor: Tensor, heads: int) -> Tensor:
    if tensor.dim() == 4:
        return tensor
    batch, length, width = tensor.shape
    return tensor.reshape(batch, length, heads, width // heads).transpose(1, 2)
