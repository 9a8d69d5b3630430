"""Embedding, indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import TABLE, XH, X
from tests.recorded.cases.functions.registry import BF16, BOOL, I32, add, group, index, module, t

group("indexing")
add("embedding", lambda i, w: F.embedding(i, w), index(8, 128), TABLE)
add("embedding_large", lambda i, w: F.embedding(i, w), index(8, 1024), TABLE)
add("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=0), index(8, 128), TABLE)
add("embedding_bag_mean", lambda i, w: F.embedding_bag(i, w, mode="mean"), index(64, 16), TABLE)
add("embedding_bag_sum", lambda i, w: F.embedding_bag(i, w, mode="sum"), index(64, 16), TABLE)
add("embedding_bag_max", lambda i, w: F.embedding_bag(i, w, mode="max"), index(64, 16), TABLE)
add("embedding_bag_offsets", lambda i, w, o: F.embedding_bag(i, w, o), index(1024), TABLE, index(64))
add(
    "embedding_bag_weighted",
    lambda i, w, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
    index(64, 16),
    TABLE,
    t(64, 16),
)
add("one_hot", lambda i: F.one_hot(i, 1000), index(512))
add("index_rows", lambda x, i: x[i], t(1000, 512), index(300))
add("index_two", lambda x, i, j: x[i, j], t(1000, 512), index(300), index(300))
add("index_columns", lambda x, i: x[:, i], t(64, 1000, 32), index(300))
add("index_mask", lambda x, m: x[m], t(1000, 512), index(1000, dtype=BOOL))
add("index_select", lambda x, i: x.index_select(0, i), t(1000, 512), index(300))
add("index_select_1", lambda x, i: x.index_select(1, i), t(1000, 512), index(300))
add("gather", lambda x, i: x.gather(1, i), t(64, 1000), index(64, 100))
add("take", lambda x, i: x.take(i), t(64, 1000), index(500))
add("take_along_dim", lambda x, i: x.take_along_dim(i, 1), t(64, 1000, 1), index(64, 100, 32))
add("scatter", lambda x, i, s: x.scatter(1, i, s), t(64, 1000), index(64, 100), t(64, 100))
add("scatter_value", lambda x, i: x.scatter(1, i, 1.0), t(64, 1000), index(64, 100))
add("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), t(64, 1000), index(64, 100), t(64, 100))
add(
    "scatter_add_half",
    lambda x, i, s: x.scatter_add(1, i, s),
    t(64, 1000, dtype=BF16),
    index(64, 100),
    t(64, 100, dtype=BF16),
)
add("scatter_reduce_mean", lambda x, i, s: x.scatter_reduce(1, i, s, "mean"), t(64, 1000), index(64, 100), t(64, 100))
add("scatter_reduce_amax", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), t(64, 1000), index(64, 100), t(64, 100))
add("index_add", lambda x, i, s: x.index_add(0, i, s), t(1000, 512), index(300), t(300, 512))
add("index_copy", lambda x, i, s: x.index_copy(0, i, s), t(1000, 512), index(300), t(300, 512))
add("index_fill", lambda x, i: x.index_fill(0, i, 0.0), t(1000, 512), index(300))
add("index_put", lambda x, i, s: x.index_put((i,), s), t(1000, 512), index(300), t(300, 512))
add(
    "index_put_accumulate", lambda x, i, s: x.index_put((i,), s, accumulate=True), t(1000, 512), index(300), t(300, 512)
)
add("setitem", lambda x, s: _setitem(x, s), t(64, 1000), t(64, 100))
add("masked_fill", lambda x, m: x.masked_fill(m, 0.0), X, index(64, 4096, dtype=BOOL))
add("masked_fill_broadcast", lambda x, m: x.masked_fill(m, -1e9), t(8, 12, 128, 128), index(8, 1, 1, 128, dtype=BOOL))
add("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), X, index(64, 4096, dtype=BOOL), X)
add("masked_select", lambda x, m: x.masked_select(m), X, index(64, 4096, dtype=BOOL))
add("where", lambda m, x, y: torch.where(m, x, y), index(64, 4096, dtype=BOOL), X, X)
add("where_mixed_types", lambda m, x, y: torch.where(m, x, y), index(64, 4096, dtype=BOOL), X, t(4096, dtype=BF16))
add("where_scalar", lambda m, x: torch.where(m, x, 0.0), index(64, 4096, dtype=BOOL), X)
add("nonzero", lambda x: x.nonzero(), X)
add("bucketize", lambda x, b: torch.bucketize(x, b), X, t(100, grad=False), grad=False)
add("searchsorted", lambda b, x: torch.searchsorted(b, x), t(100, grad=False), X, grad=False)
add("bincount", lambda i: torch.bincount(i), index(1000))
add("histc", lambda x: torch.histc(x, 100, 0.0, 1.0), X, grad=False)


def _setitem(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :100] = s
    return y


# --- indices that are copied before they are used ---------------------------------------------------------------------


def _put(index: Any, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def assign(x: torch.Tensor) -> torch.Tensor:
        x[index] = value
        return x

    return assign


CUBE = t(64, 1000, 32)
HOST = torch.tensor([3, 1, 2])
add("index_list", lambda x: x[:, [-2, 0]], CUBE)
add("index_host", lambda x: x[:, HOST.clone()], CUBE)
add("index_host_32", lambda x: x[:, HOST.int()], CUBE)
add("index_host_two", lambda x: x[HOST.clone(), HOST.clone()], CUBE)
add("index_host_and_device", lambda x, i: x[i, HOST.clone()], CUBE, index(3))
add("index_32", lambda x, i: x[:, i], CUBE, index(300, dtype=I32))
add("index_broadcast", lambda x, i, j: x[i[:, None], j[None, :]], CUBE, index(20), index(30))
add("index_broadcast_32", lambda x, i, j: x[i[:, None], j], CUBE, index(20), index(30, dtype=I32), grad=False)
add("assign_list", _put((slice(None), [0, 1]), 0.0), t(64, 1000, 32, grad=False))
add("assign_host", lambda x: _put((slice(None), HOST.clone()), 1.0)(x), t(64, 1000, 32, grad=False))
add("assign_device", lambda x, i: _put(i, 1.0)(x), t(64, 1000, 32, grad=False), index(7))
add("assign_device_32", lambda x, i: _put(i, 1.0)(x), t(64, 1000, 32, grad=False), index(7, dtype=I32))
add("assign_slice", _put((slice(None), 3), 1.0), t(64, 1000, 32, grad=False))
add("embedding_strided", lambda i, w: F.embedding(i[:, :, 2], w), index(8, 128, 7), TABLE)
add("embedding_transposed", lambda i, w: F.embedding(i.t(), w).mT.contiguous(), index(8, 128), TABLE)
add(
    "embedding_strided_large",
    lambda i, w: F.embedding(i[:, :, 2], w).transpose(0, 1).contiguous(),
    index(8, 512, 7),
    TABLE,
)
add("index_add_last", lambda x, i, s: x.index_add(1, i, s, alpha=2.0), t(64, 1000), index(300), t(64, 300))
add("index_reduce", lambda x, i, s: x.index_reduce(0, i, s, "mean"), t(1000, 64), index(300), t(300, 64), grad=False)
add("put", lambda x, i, s: x.put(i, s), t(64, 1000), index(500), t(500))
add("put_accumulate", lambda x, i, s: x.put(i, s, accumulate=True), t(64, 1000), index(500), t(500))
add(
    "scatter_reduce_mean_in_place",
    lambda x, i, s: x.detach().scatter_reduce_(1, i, s, "mean"),
    t(64, 1000),
    index(64, 100),
    t(64, 100),
)
add("scatter_reduce_sum", lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), t(64, 1000), index(64, 100), t(64, 100))
add(
    "scatter_reduce_mean_exclusive",
    lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False),
    t(64, 1000),
    index(64, 100),
    t(64, 100),
)
add("scatter_multiply", lambda x, i: x.scatter(1, i, 2.0, reduce="multiply"), t(64, 1000), index(64, 100), grad=False)
add("select_scatter", lambda x, s: torch.select_scatter(x, s, 0, 3), X, t(4096))
add("slice_scatter", lambda x, s: torch.slice_scatter(x, s, 0, 8, 24), X, t(16, 4096))
add("diagonal_scatter", lambda x, s: torch.diagonal_scatter(x, s), t(512, 512), t(512))
add("masked_scatter_broadcast", lambda x, m, s: x.masked_scatter(m, s), X, index(64, 1, dtype=BOOL), X)
add("index_put_mask_fill", lambda x, m: _fill_masked(x, m), X, index(64, 4096, dtype=BOOL))
add("bincount_minlength", lambda i: torch.bincount(i, minlength=64), index(100000), grad=False)
add("bincount_weights", lambda i, w: torch.bincount(i, w, 64), index(1000), t(1000, grad=False), grad=False)
add("where_positions", lambda m: torch.where(m), index(64, 4096, dtype=BOOL))
add("index_mask_elements", lambda x, m: x[m], X, index(64, 4096, dtype=BOOL))
add("masked_select_row", lambda x, m: x.masked_select(m), X, index(64, 1, dtype=BOOL))
add("bucketize_int32", lambda x, b: torch.bucketize(x, b, out_int32=True), X, t(100, grad=False), grad=False)
add("searchsorted_rows", lambda b, x: torch.searchsorted(b, x), t(64, 100, grad=False), t(64, 50), grad=False)
add("histogram_like", lambda x: torch.histc(x.float(), 64), XH, grad=False)
add("embedding_max_norm", lambda i, w: F.embedding(i, w.detach(), max_norm=1.0), index(8, 128), TABLE, grad=False)
add("embedding_scaled", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), index(8, 1024), TABLE)
module("embedding_bag_module", lambda: nn.EmbeddingBag(10000, 256, include_last_offset=True), index(1024), index(65))


def _fill_masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[m] = 2.0
    return y
