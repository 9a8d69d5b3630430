"""Operators of ``torch.linalg`` that are made of others on a card and appear as one to a capture.

Spelled out in the order of ATen/native/LinearAlgebra.cpp (2.13), with the lifetimes of C++: a temporary lives until its
statement ends, a variable until its block does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphmem.capture.operators import Decomposition
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.assumed_values import Selection

_aten = torch.ops.aten

#: Products that the approximation of degree 18 is made of (``compute_T18``).
_PRODUCTS = 5


def _matrix_exp(_: Selection, matrices: Tensor) -> Tensor:
    """``mexp_impl``. One matrix is approximated by its norm, which only a card knows: it is taken to need the highest
    degree, as a batch does in any case, and each matrix to be squared equally often."""
    size = matrices.shape[-1]
    if size <= 1:
        return matrices.exp() if size else matrices.clone()
    batch = matrices.view(-1, size, size)
    norm = _operator_norm(batch)
    if len(batch) > 1:
        return _scaled_and_squared(batch, norm).view(matrices.shape)
    result = torch.full_like(batch, torch.nan, memory_format=torch.contiguous_format)
    host_index = torch.zeros(1, dtype=torch.int64)
    index = host_index.to(batch.device)
    large = batch.index_select(0, index)
    large_norm = norm.index_select(0, index)
    exponentials = _scaled_and_squared(large, large_norm)
    result.index_put_([host_index], exponentials)
    return result.view(matrices.shape)


def _operator_norm(batch: Tensor) -> Tensor:
    """``operator_1_norm``."""
    absolute = batch.abs()
    sums = absolute.sum(-2)
    norm, index = sums.max(-1)
    del index, sums, absolute
    return norm


def _scaled_and_squared(batch: Tensor, norm: Tensor) -> Tensor:
    """``compute_T18_scale_square``."""
    ratio = norm / 3.0
    logarithm = ratio.log2()
    ceiling = logarithm.ceil()
    exponents = ceiling.clamp(min=0)
    del ceiling, logarithm, ratio
    negative = -exponents
    powers = torch.pow(2, negative)
    del negative
    scaled = batch * powers.view(-1, 1, 1)
    approximated = _of_degree_18(scaled)
    order = exponents.sort(0)
    exponents_in_order, origins = order[0].to(torch.int64), order[1]
    # One section: the count of its matrices, and how often they are squared.
    counts, edges, squarings = (torch.zeros(1, dtype=torch.int64, device=batch.device) for _ in range(3))
    squared = approximated.index_select(0, origins)
    for _ in range(2):
        squared = _product(torch.empty_like(squared), squared, squared)
    output = torch.cat([squared])
    positions = origins.sort(0)[1]
    found = output.index_select(0, positions)
    del positions, output, squared, squarings, edges, counts, exponents_in_order, origins, order, approximated, scaled
    return found


def _of_degree_18(batch: Tensor) -> Tensor:
    """``compute_T18``."""
    factors = torch.zeros(_PRODUCTS, _PRODUCTS, dtype=batch.dtype).to(batch.device)
    powers = batch.new_empty((_PRODUCTS, *batch.shape))
    ones = batch.new_ones(1)
    identities = torch.diag_embed(ones.expand(batch.shape[:-1]))
    powers[0].copy_(identities)
    del identities, ones
    powers[1].copy_(batch)
    for power, left, right in ((2, 1, 1), (3, 1, 2), (4, 3, 3)):
        _product(powers[power], powers[left], powers[right])
    combined = powers.new_zeros(powers.shape)
    combined[3].add_(_product(powers[0], combined[0], combined[4]))
    combined[2].add_(combined[3])
    combined[1].add_(_product(powers[0], combined[2], combined[3]))
    del powers, factors
    return combined[1]


def _product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A batched product into memory that is there."""
    return _aten.bmm.out(left, right, out=out)


def _check_errors(_: Selection, infos: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """``_linalg_check_errors``: whether any matrix had an error is read back."""
    del api_name, is_matrix
    infos.any()


#: Operator -> its decomposition.
LINEAR_ALGEBRA: dict[OpOverload, Decomposition] = {
    _aten.linalg_matrix_exp.default: _matrix_exp,
    _aten._linalg_check_errors.default: _check_errors,
}
