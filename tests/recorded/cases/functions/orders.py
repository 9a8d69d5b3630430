"""Scans and orders."""

from __future__ import annotations

import torch

from tests.recorded.cases.functions.common import X
from tests.recorded.cases.functions.registry import BOOL, add, group, index, t

group("orders")
add("cumsum", lambda x: x.cumsum(-1), X)
add("cumsum_in_place", lambda x: x.detach().cumsum_(0), t(300_000))
add("cumsum_in_place_columns", lambda x: x.detach().t().cumsum_(0), t(300, 2000))
add("cumprod_in_place", lambda x: x.detach().cumprod_(0), t(300_000))
add("cumsum_first", lambda x: x.cumsum(0), X)
add("cumsum_1d", lambda x: x.cumsum(0), t(100000))
add("cumsum_int", lambda x: x.cumsum(-1), index(64, 4096))
add("cumsum_mask", lambda x: x.cumsum(-1), index(64, 4096, dtype=BOOL))
add("cumprod", lambda x: x.cumprod(-1), X, grad=False)
add("logcumsumexp", lambda x: x.logcumsumexp(-1), X)
add("cummax", lambda x: x.cummax(-1)[0], X)
add("sort", lambda x: x.sort(-1)[0], X)
add("sort_first", lambda x: x.sort(0)[0], X)
add("sort_long", lambda x: x.sort(-1)[0], t(16, 32000))
add("sort_1d", lambda x: x.sort()[0], t(100000))
add("sort_stable", lambda x: x.sort(stable=True, dim=-1)[0], X)
add("argsort", lambda x: x.argsort(-1), X)
add("argsort_int", lambda x: x.argsort(), index(100000))
add("topk", lambda x: x.topk(10)[0], X)
add("topk_long", lambda x: x.topk(50, -1)[0], t(16, 32000))
add("topk_large", lambda x: x.topk(2000, -1)[0], t(16, 32000))
add("topk_first", lambda x: x.topk(5, 0)[0], X)
add("topk_unsorted", lambda x: x.topk(10, sorted=False)[0], X)
add("topk_1d", lambda x: x.topk(1000)[0], t(1000000))
add("kthvalue", lambda x: x.kthvalue(5)[0], X)
add("median", lambda x: x.median(), X)
add("median_dim", lambda x: x.median(-1)[0], X)
add("mode", lambda x: x.mode(-1)[0], t(64, 512))
add("quantile", lambda x: x.quantile(0.5, -1), X)
add("unique", lambda x: x.unique(), index(1000))
add("msort", lambda x: x.msort(), X)
add("cummin", lambda x: x.cummin(-1)[0], X)
add("cumprod_grad", lambda x: x.cumprod(-1), t(64, 512))
add("kthvalue_first", lambda x: x.kthvalue(5, 0)[0], X)
add("nanmedian", lambda x: x.nanmedian(), X)
add("nanmedian_dim", lambda x: x.nanmedian(-1)[0], X)
add("quantile_all", lambda x: torch.quantile(x, 0.9), t(64, 1000))
add("quantile_many", lambda x, q: torch.quantile(x, q, dim=0), X, t(3, grad=False))
add("nanquantile", lambda x: torch.nanquantile(x, 0.5, 1), X)
add(
    "unique_inverse",
    lambda i: i.unique(return_inverse=True, return_counts=True),
    index(5000),
)
add("unique_float", lambda x: x.unique(), t(100000), grad=False)
add("unique_rows_consecutive", lambda i: torch.unique_consecutive(i), index(5000))
