"""ONNX operators that move elements: shapes, joins, slices, gathers, scatters, and tensors made of nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphmem.sources.onnx_module.registry import Call, Setting, operator, operators

operators(
    # Targets are the bound output shapes; a view where PyTorch's own operators would make one.
    {
        **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), lambda node, x, *_: x.reshape(node.shape)),
        "Expand": lambda node, x, _: x.expand(node.shape),
        "Tile": lambda node, x, _: x.repeat(
            [new // old if old else 1 for new, old in zip(node.shape, x.shape, strict=True)]
        ),
    },
    known=(1,),
)
operators(
    {
        "Transpose": lambda node, x: x.permute(node.attribute("perm", tuple(reversed(range(x.dim()))))),
        "Concat": lambda node, *tensors: torch.cat(tensors, node.attribute("axis", 1)),
    }
)


@operator("Split", known=(1,))
def _split(node: Call, x: Tensor, _: Setting = None) -> tuple[Tensor, ...]:
    axis = node.attribute("axis", 0)
    return tuple(torch.split(x, [int(spec.shape[axis]) for spec in node.specs if spec is not None], axis))


@operator("Slice", known=(1, 2, 3, 4))
def _slice(
    node: Call, x: Tensor, starts: Setting = None, ends: Setting = None, axes: Setting = None, steps: Setting = None
) -> Tensor:
    begin, end = node.numbers("starts", starts) or [], node.numbers("ends", ends) or []
    dims, by = node.numbers("axes", axes) or range(len(begin)), node.numbers("steps", steps) or [1] * len(begin)
    for dim, first, last, step in zip(dims, begin, end, by, strict=True):
        x = _sliced(x, dim, first, last, step)
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
def _gather(node: Call, x: Tensor, index: Tensor | int) -> Tensor:
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
    inner, rank = index.to(torch.int64).unbind(-1), index.dim() - 1
    batch = [_counting(x.shape[dim], dim, rank, x.device) for dim in range(node.attribute("batch_dims", 0))]
    return x[(*batch, *inner)]


def _counting(size: int, axis: int, rank: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... along one of so many dimensions."""
    return torch.arange(size, device=device).reshape([-1 if dim == axis else 1 for dim in range(rank)])


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
    return x.index_put(index.to(torch.int64).unbind(-1), updates, accumulate=reduction == "add")


@operator("OneHot", known=(1,))
def _one_hot(node: Call, index: Tensor, depth: Setting, values: Tensor) -> Tensor:
    axis = node.attribute("axis", -1) % len(node.shape)
    size = node.shape[axis]
    counting = _counting(size, axis, len(node.shape), index.device)
    index = index.to(torch.int64)
    is_hot = torch.where(index < 0, index + size, index).unsqueeze(axis) == counting
    return torch.where(is_hot, values[1], values[0])


@operator("Trilu", known=(1,))
def _trilu(node: Call, x: Tensor, diagonal: Setting = None) -> Tensor:
    function = torch.triu if node.attribute("upper", 1) else torch.tril
    return function(x, node.number("k", diagonal, 0))


@operator("DepthToSpace")
def _depth_to_space(node: Call, x: Tensor) -> Tensor:
    block = node.attribute("blocksize", 1)
    if node.attribute("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    parts = x.reshape(n, block, block, c // block**2, h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(node.shape)


@operator("SpaceToDepth")
def _space_to_depth(node: Call, x: Tensor) -> Tensor:
    block = node.attribute("blocksize", 1)
    if node.attribute("mode", "DCR") == "CRD":
        return functional.pixel_unshuffle(x, block)
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // block, block, w // block, block)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(node.shape)


_PAD_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad", known=(1, 2, 3))
def _pad(node: Call, x: Tensor, pads: Setting = None, value: Setting = None, axes: Setting = None) -> Tensor:
    given = node.numbers("pads", pads) or []
    dims = node.numbers("axes", axes) or list(range(x.dim()))
    sides = {dim % x.dim(): (given[i], given[i + len(dims)]) for i, dim in enumerate(dims)}
    pairs = [sides.get(dim, (0, 0)) for dim in reversed(range(x.dim()))]
    mode = node.attribute("mode", "constant")
    if mode == "constant":
        return functional.pad(x, [p for pair in pairs for p in pair], value=node.number("value", value, 0))
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


# --- tensors made of nothing ------------------------------------------------------------------------------------------


@operator("Shape", "Size")
def _shape(node: Call, x: Tensor) -> Tensor:
    """A shape beyond the values that are folded at loading, or one that is an output of the graph."""
    if node.node.op_type == "Size":
        return torch.tensor(x.numel(), device=node.device)
    part = slice(node.attribute("start", 0), node.attribute("end", None))
    return torch.tensor(list(x.shape)[part], dtype=torch.int64, device=node.device)


@operator("ConstantOfShape", known=(0,))
def _constant_of_shape(node: Call, _: Setting) -> Tensor:
    return torch.full(node.shape, node.attribute("value", (0,))[0], dtype=node.dtype, device=node.device)


@operator("Range", known=(0, 1, 2))
def _range(node: Call, start: Setting, limit: Setting, step: Setting) -> Tensor:
    bounds = (node.number(name, value) for name, value in (("start", start), ("limit", limit), ("delta", step)))
    return torch.arange(*bounds, dtype=node.dtype, device=node.device)


@operator("EyeLike")
def _eye_like(node: Call, x: Tensor) -> Tensor:
    diagonal = torch.ones(node.shape, dtype=node.dtype, device=node.device)
    offset = node.attribute("k", 0)
    return torch.triu(torch.tril(diagonal, offset), offset)
