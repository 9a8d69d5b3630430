"""Operators that deterministic mode makes of ``index_put_``, whose sorted kernel adds in order.

``index_add_cuda_impl`` and ``index_copy`` (ATen/native/cuda/Indexing.cu, TensorAdvancedIndexing.cpp), ``scatter_impl``
and ``scatter_add`` with ``_scatter_via_index_put`` (TensorAdvancedIndexing.cpp, 2.13). The backward passes of
``gather`` and ``index_select`` call them. Recorded on the CUDA build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.values.selection import Selection

_aten = torch.ops.aten
Body = Callable[..., Any]


def _where_asked(body: Callable[..., Tensor], in_place: bool) -> Body:
    """``body(written, ...)`` in deterministic mode; other calls are one kernel. A call out of place writes a copy."""

    def run(_: Selection, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.are_deterministic_algorithms_enabled():
            return NotImplemented
        written = self if in_place else self.clone()
        return body(written, *args, **kwargs)

    return run


def _index_add(written: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return _put(written, dim, index, source * alpha, accumulate=True)


def _index_copy(written: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _put(written, dim, index, source, accumulate=False)


def _put(written: Tensor, dim: int, index: Tensor, values: Tensor, *, accumulate: bool) -> Tensor:
    indices = [*[None] * (dim % max(1, written.dim())), index]
    _aten._index_put_impl_.default(written, indices, values, accumulate, False)
    return written


def _scatter(written: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _via_index_put(written, dim, index, src, accumulate=False)


def _scatter_add(written: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _via_index_put(written, dim, index, src, accumulate=True)


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


#: Operator -> its body, which answers ``NotImplemented`` where the mode is off.
DETERMINISTIC: dict[Any, Body] = {
    _aten.index_add.default: _where_asked(_index_add, False),
    _aten.index_add_.default: _where_asked(_index_add, True),
    _aten.index_copy.default: _where_asked(_index_copy, False),
    _aten.index_copy_.default: _where_asked(_index_copy, True),
    _aten.scatter.src: _where_asked(_scatter, False),
    _aten.scatter_.src: _where_asked(_scatter, True),
    _aten.scatter_add.default: _where_asked(_scatter_add, False),
    _aten.scatter_add_.default: _where_asked(_scatter_add, True),
}
