"""ONNX's matrix products, reductions and scans."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from graphmem.sources.onnx_module.registry import Call, Setting, operator, operators

operators(
    {
        "MatMul": lambda node, x, y: torch.matmul(x, y),
        "Einsum": lambda node, *tensors: torch.einsum(node.attribute("equation", ""), *tensors),
        "LpNormalization": lambda node, x: functional.normalize(
            x, float(node.attribute("p", 2)), node.attribute("axis", -1)
        ),
    }
)


@operator("Gemm")
def _gemm(node: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    left = a.t() if node.attribute("transA", 0) else a
    right = b.t() if node.attribute("transB", 0) else b
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    if c is not None:
        return torch.addmm(c, left, right, beta=beta, alpha=alpha)
    product = torch.mm(left, right)
    return product if alpha == 1 else product * alpha


@operator("CumSum", known=(1,))
def _cum_sum(node: Call, x: Tensor, axis: Setting) -> Tensor:
    dim, reverse = node.number("axis", axis), node.attribute("reverse", 0)
    ahead = x.flip(dim) if reverse else x
    total = torch.cumsum(ahead, dim, dtype=x.dtype)
    if node.attribute("exclusive", 0):
        total = total - ahead
    return total.flip(dim) if reverse else total


# --- reductions -------------------------------------------------------------------------------------------------------


def _product(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    for dim in sorted((dim % x.dim() for dim in dims), reverse=True):
        x = torch.prod(x, dim, keepdim=keepdim)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": lambda x, dims, keep: torch.sum(x, dims, keepdim=keep, dtype=x.dtype),
    "ReduceMean": lambda x, dims, keep: torch.mean(x, dims, keepdim=keep),
    "ReduceMax": lambda x, dims, keep: torch.amax(x, dims, keepdim=keep),
    "ReduceMin": lambda x, dims, keep: torch.amin(x, dims, keepdim=keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, dims, keep: torch.sum(torch.abs(x), dims, keepdim=keep, dtype=x.dtype),
    "ReduceL2": lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keepdim=keep),
    "ReduceLogSum": lambda x, dims, keep: torch.log(torch.sum(x, dims, keepdim=keep)),
    "ReduceLogSumExp": lambda x, dims, keep: torch.logsumexp(x, dims, keepdim=keep),
    "ReduceSumSquare": lambda x, dims, keep: torch.sum(torch.square(x), dims, keepdim=keep, dtype=x.dtype),
}


def _reduce(
    function: Callable[[Tensor, list[int], bool], Tensor], node: Call, x: Tensor, axes: Setting = None
) -> Tensor:
    dims = node.numbers("axes", axes)
    if not dims and node.attribute("noop_with_empty_axes", 0):
        return function(x.unsqueeze(0), [0], False)
    return function(x, dims or list(range(x.dim())), bool(node.attribute("keepdims", 1)))


operators({name: functools.partial(_reduce, function) for name, function in _REDUCTIONS.items()}, known=(1,))


@operator("ArgMax", "ArgMin")
def _arg_extreme(node: Call, x: Tensor) -> Tensor:
    dim, keep = node.attribute("axis", 0), bool(node.attribute("keepdims", 1))
    function = torch.argmax if node.node.op_type == "ArgMax" else torch.argmin
    if node.attribute("select_last_index", 0):
        return x.shape[dim] - 1 - function(x.flip(dim), dim, keepdim=keep)
    return function(x, dim, keepdim=keep)


@operator("TopK", known=(1,))
def _top_k(node: Call, x: Tensor, count: Setting = None) -> tuple[Tensor, Tensor]:
    axis, sort = node.attribute("axis", -1), bool(node.attribute("sorted", 1))
    found = torch.topk(x, node.shape[axis], axis, largest=bool(node.attribute("largest", 1)), sorted=sort)
    return found.values, found.indices


@operator("Hardmax")
def _hardmax(node: Call, x: Tensor) -> Tensor:
    axis = node.attribute("axis", -1)
    return torch.zeros_like(x).scatter_(axis, torch.argmax(x, axis, keepdim=True), 1.0)
