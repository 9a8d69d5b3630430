"""Operators that deterministic mode makes of ``index_put_``, whose sorted kernel adds in order.

``index_add_cuda_impl`` and ``index_copy`` (ATen/native/cuda/Indexing.cu, TensorAdvancedIndexing.cpp), ``scatter_impl``
and ``scatter_add`` with ``_scatter_via_index_put`` (TensorAdvancedIndexing.cpp, 2.13). The backward passes of
``gather`` and ``index_select`` call them. Recorded on the CUDA build.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.base.versions import Since
from graphmem.capture.operators import Decomposition, Perhaps
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.assumed_values import Selection

_aten = torch.ops.aten


def _where_asked(decomposition: Callable[..., Tensor], in_place: bool) -> Decomposition:
    """``decomposition(written, ...)`` in deterministic mode; other calls are one kernel. A call out of place writes a
    copy."""

    def run(_: Selection, self: Tensor, *args: object, **kwargs: object) -> Perhaps:
        if not torch.are_deterministic_algorithms_enabled():
            return NotImplemented
        written = self if in_place else self.clone()
        return decomposition(written, *args, **kwargs)

    return run


def _index_add(written: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return _put(written, dim, index, source * alpha, accumulate=True)


def _index_copy(written: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _put(written, dim, index, source, accumulate=False)


def _put(written: Tensor, dim: int, index: Tensor, values: Tensor, *, accumulate: bool) -> Tensor:
    indices = [*[None] * (dim % max(1, written.dim())), index]
    _aten._index_put_impl_.default(written, indices, values, accumulate, False)
    return written


def _via_index_put(written: Tensor, dim: int, index: Tensor, src: Tensor, *, accumulate: bool) -> Tensor:
    """Positions in the other dimensions are counted, and all of them index at once."""
    if not index.numel():
        return written
    for size_dim, size in enumerate(index.shape):
        if src.shape[size_dim] != size:
            src = src.narrow(size_dim, 0, size)
    indices = []
    for other, size in enumerate(index.shape):
        if other == dim % written.dim():
            indices.append(index)
            continue
        shape = [1] * index.dim()
        shape[other] = size
        indices.append(torch.arange(size, device=written.device).view(shape).expand(index.shape))
    _aten._index_put_impl_.default(written, indices, src, accumulate, False)
    indices.reverse()
    return written


def _via_flat_index_put(written: Tensor, dim: int, index: Tensor, src: Tensor, *, accumulate: bool) -> Tensor:
    """``_scatter_via_index_put`` up to 2.8: coordinates side by side, made one index of a flat tensor."""
    if written.dim() == 1:
        _aten._index_put_impl_.default(written, [index], src, accumulate, False)
        return written
    whole = written.contiguous()
    coordinates = torch.empty((*index.shape, index.dim()), dtype=torch.int64, device=written.device)
    for other, size in enumerate(index.shape):
        if other != dim % written.dim():
            shape = [1] * index.dim()
            shape[other] = size
            coordinates[..., other].copy_(torch.arange(size, device=written.device).view(shape))
    coordinates[..., dim].copy_(index)
    strides = torch.empty(whole.dim(), dtype=torch.int64).to(written.device)
    product = coordinates.flatten(0, -2) * strides
    flat = product.sum(-1)
    del product
    target, source = whole.flatten(), src.as_strided(index.shape, src.stride()).flatten()
    _aten._index_put_impl_.default(target, [flat], source, accumulate, False)
    if not written.is_contiguous():
        written.copy_(target.view(written.shape))
    del source, target, flat, strides, coordinates
    return written


def _pair(name: str, overload: str, decomposition: Decomposition) -> dict[OpOverload, Decomposition]:
    """The operator of this name, and its twin in place."""
    both = ((name, False), (f"{name}_", True))
    return {getattr(getattr(_aten, each), overload): _where_asked(decomposition, done) for each, done in both}


def _scattering(via_index_put: Decomposition) -> dict[OpOverload, Decomposition]:
    return {
        **_pair("scatter", "src", partial(via_index_put, accumulate=False)),
        **_pair("scatter_add", "default", partial(via_index_put, accumulate=True)),
    }


#: Operator -> its decomposition, which answers ``NotImplemented`` where the mode is off.
DETERMINISTIC: dict[OpOverload, Decomposition] = {
    **_pair("index_add", "default", _index_add),
    **_pair("index_copy", "default", _index_copy),
    **_scattering(_via_index_put),
}
#: Operator -> the change of versions, and its decomposition before it.
DETERMINISTIC_BEFORE: dict[OpOverload, tuple[Since, Decomposition]] = {
    op: (versions.SCATTERS_BY_COORDINATES, decomposition)
    for op, decomposition in _scattering(_via_flat_index_put).items()
}
