"""Reductions."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.common import XH, X
from tests.recorded.cases.functions.registry import BF16, BOOL, add, group, index, t

group("reductions")
CUBE, CUBE_LAST = t(16, 64, 56, 56), t(16, 64, 56, 56, layout="channels_last")
for name, function in {
    "sum": lambda x, **k: x.sum(**k),
    "mean": lambda x, **k: x.mean(**k),
    "norm": lambda x, **k: torch.linalg.vector_norm(x, **k),
    "norm_1": lambda x, **k: torch.linalg.vector_norm(x, 1, **k),
    "norm_inf": lambda x, **k: torch.linalg.vector_norm(x, float("inf"), **k),
    "norm_3": lambda x, **k: torch.linalg.vector_norm(x, 3, **k),
    "var": lambda x, **k: x.var(**k),
    "std": lambda x, **k: x.std(**k),
    "amax": lambda x, **k: x.amax(**k),
}.items():
    add(f"{name}_all", lambda x, f=function: f(x), CUBE)
    add(f"{name}_last", lambda x, f=function: f(x, dim=-1), CUBE)
    add(f"{name}_channels", lambda x, f=function: f(x, dim=(0, 2, 3), keepdim=True), CUBE)
    add(f"{name}_spatial_channels_last", lambda x, f=function: f(x, dim=(2, 3)), CUBE_LAST)
add("var_mean", lambda x: torch.var_mean(x, (2, 3)), CUBE)
add("max_all", lambda x: x.max(), CUBE)
add("max_dim", lambda x: x.max(1)[0], CUBE)
add("min_dim", lambda x: x.min(-1)[0], CUBE)
add("argmax", lambda x: x.argmax(-1), CUBE)
add("argmax_all", lambda x: x.argmax(), CUBE)
add("prod", lambda x: x.prod(1), CUBE, grad=False)
add("any", lambda x: x.any(), index(64, 4096, dtype=BOOL))
add("any_dim", lambda x: x.any(-1), index(64, 4096, dtype=BOOL))
add("all_float", lambda x: (x > 0).all(0), X, grad=False)
add("sum_bool", lambda x: x.sum(-1), index(64, 4096, dtype=BOOL))
add("mean_bf16", lambda x: x.mean(-1), XH)
add("mean_to_fp32", lambda x: x.mean(-1, dtype=torch.float32), XH)
add("sum_bf16_first", lambda x: x.sum(0), t(8192, 768, dtype=BF16))
add("sum_tuple", lambda x: x.sum((0, 1)), t(8, 1024, 768))
add("norm_old", lambda x: x.norm(), X)
add("norm_old_dim", lambda x: x.norm(p=2, dim=1, keepdim=True), X)
add("norm_matrix", lambda x: torch.linalg.matrix_norm(x), t(16, 128, 128))
add("dist", torch.dist, X, X)
add("cdist", torch.cdist, t(4, 200, 64), t(4, 300, 64))
add("cdist_small", lambda x, y: torch.cdist(x, y), t(20, 64), t(20, 64))
add("cdist_1", lambda x, y: torch.cdist(x, y, 1.0), t(4, 200, 64), t(4, 300, 64))
add("pdist", F.pdist, t(200, 64))
add("pairwise_distance", F.pairwise_distance, X, X)
add("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), X, X)
add("nan_to_num", torch.nan_to_num, X)
add("trace", torch.trace, t(512, 512))
add("std_mean", lambda x: torch.std_mean(x, -1), X)
add("var_keepdim", lambda x: x.var(-1, keepdim=True), X)
add("nansum", lambda x: x.nansum(-1), X)
add("nanmean", lambda x: x.nanmean(-1), X)
add("amin_amax", lambda x: torch.aminmax(x), X)
add("count_nonzero", lambda x: torch.count_nonzero(x, -1), X, grad=False)
add("prod_all", lambda x: x.prod(), t(1000), grad=False)
add("renorm", lambda x: x.renorm(2, 0, 1.0), X, grad=False)
add("cosine_similarity_rows", lambda x, y: F.cosine_similarity(x[:, None], y[None], -1), t(64, 128), t(32, 128))
add("pairwise_1", lambda x, y: F.pairwise_distance(x, y, 1.0, keepdim=True), X, X)
