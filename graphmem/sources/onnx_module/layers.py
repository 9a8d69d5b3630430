"""ONNX's layers: convolutions, pooling, normalization, resizing, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from graphmem.sources.onnx_module.registry import Call, Setting, operator, operators

Outputs: TypeAlias = "Tensor | tuple[Tensor, ...]"


@dataclass(frozen=True)
class _Window:
    """How a kernel moves over the spatial dimensions. ``sides``: padding before and after, for each of them."""

    strides: list[int]
    dilations: list[int]
    sides: list[tuple[int, int]]

    @property
    def padding(self) -> list[int]:
        """Padding before each dimension."""
        return [before for before, _ in self.sides]

    @property
    def is_symmetric(self) -> bool:
        """Whether as much is padded before as after, which PyTorch's own layers can do."""
        return all(before == after for before, after in self.sides)

    def pad(self, x: Tensor, value: float = 0) -> Tensor:
        """``x`` with its padding: ``functional.pad`` takes the last dimension first."""
        return functional.pad(x, [pad for pair in reversed(self.sides) for pad in pair], value=value)


def _each(node: Call, name: str, count: int, default: int = 1) -> list[int]:
    """An attribute with a number for each spatial dimension."""
    return list(node.attribute(name, (default,) * count))


def _window(node: Call, x: Tensor, kernel: Sequence[int]) -> _Window:
    rank = len(kernel)
    strides, dilations = _each(node, "strides", rank), _each(node, "dilations", rank)
    automatic = node.attribute("auto_pad", "NOTSET")
    if automatic in ("NOTSET", "VALID"):
        pads = _each(node, "pads", 2 * rank, 0) if automatic == "NOTSET" else [0] * 2 * rank
        return _Window(strides, dilations, list(zip(pads[:rank], pads[rank:], strict=True)))
    sides = []
    for size, window, stride, dilation in zip(x.shape[2:], kernel, strides, dilations, strict=True):
        covered = (-(-size // stride) - 1) * stride + dilation * (window - 1) + 1
        total = max(0, covered - size)
        less, more = total // 2, total - total // 2
        sides.append((less, more) if automatic == "SAME_UPPER" else (more, less))
    return _Window(strides, dilations, sides)


def _of_rank(node: Call, name: str, rank: int) -> Callable[..., Tensor]:
    """The function of that name for so many spatial dimensions. Raises :class:`CaptureError` where there is none."""
    found: Callable[..., Tensor] | None = getattr(functional, f"{name}{rank}d", None)
    if found is None:
        raise node.refused(f"PyTorch has none with {rank} spatial dimensions")
    return found


@operator("Conv")
def _conv(node: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    window = _window(node, x, weight.shape[2:])
    padding = window.padding
    if not window.is_symmetric:
        x, padding = window.pad(x), [0] * rank
    function = _of_rank(node, "conv", rank)
    return function(x, weight, bias, window.strides, padding, window.dilations, node.attribute("group", 1))


@operator("ConvTranspose")
def _conv_transpose(node: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    strides, dilations = _each(node, "strides", rank), _each(node, "dilations", rank)
    extra, pads = _each(node, "output_padding", rank, 0), _each(node, "pads", 2 * rank, 0)
    function = _of_rank(node, "conv_transpose", rank)
    group, is_given = node.attribute("group", 1), "output_shape" in node.node.attributes
    automatic = node.attribute("auto_pad", "NOTSET")
    if automatic == "NOTSET" and not is_given and pads[:rank] == pads[rank:]:
        return function(x, weight, bias, strides, pads[:rank], extra, group, dilations)
    whole = function(x, weight, bias, strides, [0] * rank, [0] * rank, group, dilations)
    for i in range(rank):
        cut = whole.shape[2 + i] + extra[i] - node.shape[2 + i]
        is_upper = automatic == "SAME_UPPER"
        before = pads[i] if not is_given and any(pads) else cut // 2 if is_upper else cut - cut // 2
        missing = before + node.shape[2 + i] - whole.shape[2 + i]
        if missing > 0:
            whole = functional.pad(whole, [0, 0] * (rank - 1 - i) + [0, missing])
        whole = whole.narrow(2 + i, before, node.shape[2 + i])
    return whole


# --- pooling ----------------------------------------------------------------------------------------------------------


def _pools_itself(window: _Window, kernel: Sequence[int]) -> bool:
    """Whether PyTorch's pooling pads as the node does: as much on both sides, and at most half the kernel."""
    halves = all(2 * pad <= size for pad, size in zip(window.padding, kernel, strict=True))
    return window.is_symmetric and halves


@operator("MaxPool")
def _max_pool(node: Call, x: Tensor) -> Tensor:
    if node.wants(1):
        raise node.refused("its Indices count over the whole tensor, and PyTorch's over each image")
    rank = x.dim() - 2
    kernel = _each(node, "kernel_shape", rank)
    window = _window(node, x, kernel)
    padding = window.padding
    if not _pools_itself(window, kernel):
        least = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, padding = window.pad(x, least), [0] * rank
    function, ceil = _of_rank(node, "max_pool", rank), bool(node.attribute("ceil_mode", 0))
    return function(x, kernel, window.strides, padding, window.dilations, ceil_mode=ceil)


@operator("AveragePool")
def _average_pool(node: Call, x: Tensor) -> Tensor:
    rank = x.dim() - 2
    kernel = _each(node, "kernel_shape", rank)
    window = _window(node, x, kernel)
    if any(dilation != 1 for dilation in window.dilations):
        raise node.refused("PyTorch's average pooling has no dilations")
    counted, ceil = bool(node.attribute("count_include_pad", 0)), bool(node.attribute("ceil_mode", 0))
    function = _of_rank(node, "avg_pool", rank)
    if _pools_itself(window, kernel):
        return function(x, kernel, window.strides, window.padding, ceil, counted)
    means = function(window.pad(x), kernel, window.strides, 0, ceil)
    if counted:
        return means
    return means / function(window.pad(torch.ones_like(x[:1, :1])), kernel, window.strides, 0, ceil)


operators(
    {
        "GlobalAveragePool": lambda node, x: x.mean(list(range(2, x.dim())), keepdim=True),
        "GlobalMaxPool": lambda node, x: x.amax(list(range(2, x.dim())), keepdim=True),
    }
)


# --- normalization ----------------------------------------------------------------------------------------------------


@operator("BatchNormalization")
def _batch_norm(node: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Outputs:
    """In training always with the batch's statistics, also where the file was exported for inference."""
    momentum, epsilon = 1 - node.attribute("momentum", 0.9), node.attribute("epsilon", 1e-5)
    if node.wants(1) and not node.training:
        raise node.refused("it gives the statistics of a training export; analyse it with --training")
    result = functional.batch_norm(x, mean, variance, scale, bias, node.training, momentum, epsilon)
    return (result, mean, variance) if node.wants(1) else result


operators(
    {
        "InstanceNormalization": lambda node, x, scale, bias: functional.instance_norm(
            x, weight=scale, bias=bias, eps=node.attribute("epsilon", 1e-5)
        ),
        "LRN": lambda node, x: functional.local_response_norm(
            x, node.attribute("size", 0), node.attribute("alpha", 1e-4), node.attribute("beta", 0.75),
            node.attribute("bias", 1.0),
        ),
    }
)  # fmt: skip


@operator("LayerNormalization")
def _layer_norm(node: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Outputs:
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
    groups = node.attribute("num_groups", 1)
    if scale.shape[0] != x.shape[1]:  # one for each group, as before operator set 21
        scale, bias = (weight.repeat_interleave(x.shape[1] // groups) for weight in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, node.attribute("epsilon", 1e-5))


# --- images -----------------------------------------------------------------------------------------------------------

#: Modes of ``interpolate`` by ONNX's and the number of spatial dimensions.
_INTERPOLATIONS = {
    ("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic",
}  # fmt: skip


@operator("Resize", "Upsample", known=(1, 2, 3))
def _resize(node: Call, x: Tensor, *_: Setting) -> Tensor:
    """``interpolate`` to the bound output shape. Where ONNX's coordinates are none of PyTorch's, the values would
    differ a little and the memory does not."""
    size, mode = node.shape[2:], node.attribute("mode", "nearest")
    if node.shape[:2] != tuple(x.shape[:2]):
        raise node.refused("it resizes the batch or the channels, which PyTorch's interpolate does not")
    coordinates = node.attribute("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        exact = coordinates == "half_pixel" and node.node.op_type == "Resize"
        return functional.interpolate(x, size, mode="nearest-exact" if exact else "nearest")
    name = _INTERPOLATIONS.get((mode, x.dim() - 2))
    if name is None:
        raise node.refused(f"PyTorch interpolates {x.dim() - 2} dimensions in no {mode} mode")
    aligned, antialias = coordinates == "align_corners", bool(node.attribute("antialias", 0))
    return functional.interpolate(x, size, mode=name, align_corners=aligned, antialias=antialias)


@operator("GridSample")
def _grid_sample(node: Call, x: Tensor, grid: Tensor) -> Tensor:
    mode, padding = node.attribute("mode", "linear"), node.attribute("padding_mode", "zeros")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return functional.grid_sample(x, grid, mode, padding, align_corners=bool(node.attribute("align_corners", 0)))


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
) -> tuple[Tensor, Tensor, Tensor]:
    if node.attribute("softcap", 0.0) or node.wants(3) or lengths is not None:
        raise node.refused("its softcap, key lengths or scores are none of scaled_dot_product_attention's")
    if not node.node.attributes.keys() <= _ATTENTION:
        unknown = ", ".join(sorted(node.node.attributes.keys() - _ATTENTION))
        raise node.refused(f"its attributes {unknown} are none of scaled_dot_product_attention's")
    heads = node.attribute("q_num_heads", 0), *(node.attribute("kv_num_heads", 0),) * 2
    q, k, v = (_heads(tensor, count) for tensor, count in zip((query, key, value), heads, strict=True))
    if past_key is not None and past_value is not None:
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
    is_causal = bool(node.attribute("is_causal", 0))
    if is_causal and (mask is not None or past_key is not None):
        raise node.refused("it is causal beside a mask or a past, which scaled_dot_product_attention is not")
    made = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=node.attribute("scale", None), enable_gqa=q.shape[1] != k.shape[1]
    )
    if query.dim() == 3:
        made = made.transpose(1, 2).reshape(node.shape)
    return made, k, v


def _heads(tensor: Tensor, heads: int) -> Tensor:
    if tensor.dim() == 4:
        return tensor
    batch, length, width = tensor.shape
    return tensor.reshape(batch, length, heads, width // heads).transpose(1, 2)
