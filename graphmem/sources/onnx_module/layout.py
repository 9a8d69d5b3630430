"""ONNX operators that move elements: shapes, joins, slices, gathers, scatters, and tensors made of nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphmem.sources.onnx_module.registry import Call, operator


@operator("Reshape", "Flatten", "Squeeze", "Unsqueeze", known=(1,))
def _reshape(node: Call, x: Tensor, *_: Any) -> Tensor:
    """The target is the bound output shape; a view where PyTorch's own operators would make one."""
    return x.reshape(node.shape)


@operator("Expand", known=(1,))
def _expand(node: Call, x: Tensor, _: Any) -> Tensor:
    return x.expand(node.shape)


@operator("Transpose")
def _transpose(node: Call, x: Tensor) -> Tensor:
    return x.permute(node.attribute("perm", tuple(reversed(range(x.dim())))))


@operator("Concat")
def _concat(node: Call, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, node.attribute("axis", 1))


@operator("Split", known=(1,))
def _split(node: Call, x: Tensor, _: Any = None) -> tuple[Tensor, ...]:
    axis = node.attribute("axis", 0)
    return tuple(torch.split(x, [int(spec.shape[axis]) for spec in node.specs if spec is not None], axis))


@operator("Slice", known=(1, 2, 3, 4))
def _slice(node: Call, x: Tensor, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Tensor:
    begin, end = node.setting("starts", starts), node.setting("ends", ends)
    dims = node.setting("axes", axes) or range(len(begin))
    for dim, first, last, step in zip(dims, begin, end, node.setting("steps", steps) or [1] * len(begin), strict=True):
        x = _sliced(x, int(dim), int(first), int(last), int(step))
    return x


def _sliced(x: Tensor, dim: int, first: int, last: int, step: int) -> Tensor:
    size = x.shape[dim]
    first, last = (bound + size if bound < 0 else bound for bound in (first, last))
    if step > 0:
        first, last = min(max(first, 0), size), min(max(last, 0), size)
        if (first, last, step) == (0, size, 1):
            return x
        return x[(slice(None),) * (dim % x.dim()) + (slice(first, last, step),)]
    taken = range(min(max(first, 0), size - 1), min(max(last, -1), size - 1), step)
    if not taken:
        return x.narrow(dim, 0, 0)
    return x[(slice(None),) * (dim % x.dim()) + (slice(taken[-1], taken[0] + 1, -step),)].flip(dim)


@operator("Gather", numbers=(1,))
def _gather(node: Call, x: Tensor, index: Any) -> Tensor:
    """``embedding`` on a weight, ``select`` for one index, else ``index``: as ``weight(ids)``, ``x[:, 0]``, ``x[ids]``
    are run."""
    axis = node.attribute("axis", 0) % x.dim()
    if not isinstance(index, Tensor):
        return x.select(axis, int(index))
    if axis == 0 and x.dim() == 2 and isinstance(x, nn.Parameter):
        return functional.embedding(index, x)
    return x[(slice(None),) * axis + (index.to(torch.int64),)]


@operator("GatherElements")
def _gather_elements(node: Call, x: Tensor, index: Tensor) -> Tensor:
    axis = node.attribute("axis", 0)
    return torch.gather(x, axis, _wrapped(index, x.shape[axis]))


def _wrapped(index: Tensor, size: int) -> Tensor:
    """Negative indices count from the end in ONNX, which ``gather`` and ``scatter`` do not know. Shapes alone are
    analysed, where values tell nothing; real ones are wrapped."""
    index = index.to(torch.int64)
    if index.device.type == "cpu" and type(index) is Tensor and bool((index < 0).any()):
        return torch.where(index < 0, index + size, index)
    return index


@operator("GatherND")
def _gather_nd(node: Call, x: Tensor, index: Tensor) -> Tensor:
    return x[_positions(x, index, node.attribute("batch_dims", 0))]


def _positions(x: Tensor, index: Tensor, batch_dims: int = 0) -> tuple[Tensor, ...]:
    inner = index.to(torch.int64).unbind(-1)
    batch = []
    for dim in range(batch_dims):
        counting = torch.arange(x.shape[dim], device=x.device)
        batch.append(counting.reshape([-1 if d == dim else 1 for d in range(index.dim() - 1)]))
    return (*batch, *inner)


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements", "Scatter")
def _scatter_elements(node: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis, reduction = node.attribute("axis", 0), node.attribute("reduction", "none")
    index = _wrapped(index, x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, index, updates)
    return torch.scatter_reduce(x, axis, index, updates, _REDUCTIONS[reduction])


@operator("ScatterND")
def _scatter_nd(node: Call, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    reduction = node.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise node.refused(f"its reduction {reduction!r} is not supported")
    return x.index_put(_positions(x, index), updates, accumulate=reduction == "add")


@operator("OneHot", known=(1,))
def _one_hot(node: Call, index: Tensor, depth: Any, values: Tensor) -> Tensor:
    axis = node.attribute("axis", -1) % len(node.shape)
    size = node.shape[axis]
    counting = torch.arange(size, device=index.device).reshape([-1 if d == axis else 1 for d in range(len(node.shape))])
    index = index.to(torch.int64)
    is_hot = torch.where(index < 0, index + size, index).unsqueeze(axis) == counting
    return torch.where(is_hot, values[1], values[0])


@operator("Trilu", known=(1,))
def _trilu(node: Call, x: Tensor, diagonal: Any = None) -> Tensor:
    given = node.setting("k", diagonal, 0)
    offset = int(given[0] if isinstance(given, list) else given)
    return torch.triu(x, offset) if node.attribute("upper", 1) else torch.tril(x, offset)


@operator("Tile", known=(1,))
def _tile(node: Call, x: Tensor, _: Any) -> Tensor:
    return x.repeat([new // old if old else 1 for new, old in zip(node.shape, x.shape, strict=True)])


@operator("DepthToSpace")
def _depth_to_space(node: Call, x: Tensor) -> Tensor:
    block = node.attribute("blocksize")
    if node.attribute("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    parts = x.reshape(n, block, block, c // block**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(node.shape)


@operator("SpaceToDepth")
def _space_to_depth(node: Call, x: Tensor) -> Tensor:
    block = node.attribute("blocksize")
    if node.attribute("mode", "DCR") == "CRD":
        return functional.pixel_unshuffle(x, block)
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // block, block, w // block, block)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(node.shape)


_PAD_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad", known=(1, 2, 3))
def _pad(node: Call, x: Tensor, pads: Any = None, value: Any = None, axes: Any = None) -> Tensor:
    given = node.setting("pads", pads)
    dims = node.setting("axes", axes) or list(range(x.dim()))
    sides = {dim % x.dim(): (given[i], given[i + len(dims)]) for i, dim in enumerate(dims)}
    pairs = [sides.get(dim, (0, 0)) for dim in reversed(range(x.dim()))]
    mode = node.attribute("mode", "constant")
    if mode == "constant":
        filler = node.setting("value", value, 0)
        return functional.pad(x, [p for pair in pairs for p in pair], value=_single(filler))
    while pairs and pairs[-1] == (0, 0):
        pairs.pop()
    if not pairs:
        return x
    padded = functional.pad(
        x.reshape(1, 1, *x.shape) if x.dim() == len(pairs) else x,
        [p for pair in pairs for p in pair],
        mode=_PAD_MODES[mode],
    )
    return padded.reshape(node.shape)


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


# --- tensors made of nothing ------------------------------------------------------------------------------------------


@operator("Shape", "Size")
def _shape(node: Call, x: Tensor) -> Tensor:
    """A shape beyond the values that are folded at loading, or one that is an output of the graph."""
    if node.node.op_type == "Size":
        return torch.tensor(x.numel(), device=node.device)
    part = slice(node.attribute("start", 0), node.attribute("end"))
    return torch.tensor(list(x.shape)[part], dtype=torch.int64, device=node.device)


@operator("ConstantOfShape", known=(0,))
def _constant_of_shape(node: Call, _: Any) -> Tensor:
    return torch.full(node.shape, _single(list(node.attribute("value", (0,)))), dtype=node.dtype, device=node.device)


@operator("Range", known=(0, 1, 2))
def _range(node: Call, start: Any, limit: Any, step: Any) -> Tensor:
    first, last, by = (_single(node.setting(n, v)) for n, v in (("start", start), ("limit", limit), ("delta", step)))
    return torch.arange(first, last, by, dtype=node.dtype, device=node.device)


@operator("EyeLike")
def _eye_like(node: Call, x: Tensor) -> Tensor:
    diagonal = torch.ones(node.shape, dtype=node.dtype, device=node.device)
    offset = node.attribute("k", 0)
    return torch.triu(torch.tril(diagonal, offset), offset)
