"""Dropout and random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributions.dirichlet import _Dirichlet

from tests.recorded.cases.functions.common import IMAGE, SERIES, VOLUME, XH, X
from tests.recorded.cases.functions.registry import FP16, add, group, t

group("random")
add("dropout", lambda x: F.dropout(x, 0.1), X)
add("dropout_eval", lambda x: F.dropout(x, 0.1, training=False), X)
add("dropout_all", lambda x: F.dropout(x, 1.0), X)
add("dropout_inplace", lambda x: F.dropout(x * 2, 0.1, inplace=True), X)
add("dropout1d", lambda x: F.dropout1d(x, 0.1), SERIES)
add("dropout2d", lambda x: F.dropout2d(x, 0.1), IMAGE)
add("dropout2d_inplace", lambda x: F.dropout2d(x * 2, 0.1, inplace=True), IMAGE)
add("dropout3d", lambda x: F.dropout3d(x, 0.1), VOLUME)
add("alpha_dropout", lambda x: F.alpha_dropout(x, 0.1, training=True), X)
add("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x, 0.1, training=True), IMAGE)
add("rand", lambda x: x * torch.rand_like(x) + torch.rand(64, 1, device=x.device), X)
add("randn", lambda x: x + torch.randn_like(x) + torch.randn(64, 1, device=x.device), X)
add("randn_bf16", lambda x: x + torch.randn_like(x), XH)
add("randint", lambda x: torch.randint(0, 100, (64, 4096), device=x.device), X, grad=False)
add("randperm", lambda x: torch.randperm(10000, device=x.device), X, grad=False)
add("randperm_large", lambda x: torch.randperm(1000000, device=x.device), X, grad=False)
add(
    "randperm_generator",
    lambda x: torch.randperm(100000, device=x.device, generator=torch.Generator(x.device)),
    X,
    grad=False,
)
add("normal", lambda x: torch.normal(0.0, 1.0, (64, 4096), device=x.device) + x, X)
COLUMNS = t(1024, 1024, grad=False, layout="transposed")
_PLAIN = t(64, 4096, grad=False)
add("normal_of_tensors", lambda m, s: torch.normal(m, s), _PLAIN, _PLAIN, true_values=True)
add(
    "normal_of_broadcast",
    lambda m, s: torch.normal(m, s.expand(64, -1)),
    _PLAIN,
    t(1, 4096, grad=False),
    true_values=True,
)
add("normal_of_means", lambda m: torch.normal(m, 0.5), _PLAIN)
add("normal_of_deviations", lambda s: torch.normal(0.0, s), _PLAIN, true_values=True)
add("normal_of_columns", lambda m, s: torch.normal(m, s), COLUMNS, t(1024, 1024, grad=False), true_values=True)
add("normal_of_halves", lambda m, s: torch.normal(m.half(), s.half()), _PLAIN, _PLAIN, true_values=True)
add("bernoulli", lambda x: torch.bernoulli(x), t(64, 4096, grad=False))
add("bernoulli_half", lambda x: torch.bernoulli(x), t(64, 4096, dtype=FP16, grad=False))
add("bernoulli_of_doubles", lambda x: torch.empty_like(x).bernoulli_(x.double()), t(64, 4096, grad=False))
add("bernoulli_of_halves", lambda x: torch.empty_like(x).bernoulli_(x.half()), t(64, 4096, grad=False))
add("bernoulli_p", lambda x: x * torch.empty_like(x).bernoulli_(0.5), X)
add("multinomial", lambda x: torch.multinomial(x, 1), t(64, 4096, grad=False))
add("multinomial_many", lambda x: torch.multinomial(x, 100, replacement=True), t(64, 4096, grad=False))
add("multinomial_without", lambda x: torch.multinomial(x, 100), t(64, 4096, grad=False))
add("multinomial_many_blocks", lambda x: torch.multinomial(x, 4), t(1024, 1024, grad=False))
add("multinomial_sorted", lambda x: torch.multinomial(x, 6000), t(2, 50000, grad=False))
add("multinomial_one_long", lambda x: torch.multinomial(x, 1), t(2, 1000000, grad=False))
add("multinomial_of_columns", lambda x: torch.multinomial(x, 4), COLUMNS)
add("extrema_of_columns", lambda x: torch.aminmax(x), COLUMNS)
add("extrema_along_columns", lambda x: torch.aminmax(x, dim=0), COLUMNS)
add("histogram_of_columns", lambda x: torch.histc(x, 64), COLUMNS)
add("exponential", lambda x: torch.empty_like(x).exponential_(), X, grad=False)
add("drop_path", lambda x: x * x.new_empty((64, 1)).bernoulli_(0.9).div_(0.9), X)
add("multinomial_row", lambda x: torch.multinomial(x, 10), t(4096, grad=False))
add("multinomial_row_many", lambda x: torch.multinomial(x, 10, replacement=True), t(4096, grad=False))
add("multinomial_half", lambda x: torch.multinomial(x, 10), t(64, 4096, dtype=FP16, grad=False))
add("poisson", torch.poisson, t(64, 4096, grad=False))
add("draws_gamma", torch._standard_gamma, t(64, 4096))
add("draws_dirichlet", _Dirichlet.apply, t(64, 4096))
add("draws_dirichlet_pairs", torch._sample_dirichlet, t(200000, 2, grad=False))
add("draws_binomial", lambda x: torch.binomial(x, x), t(64, 4096, grad=False))
add("cauchy", lambda x: torch.empty_like(x).cauchy_(), X, grad=False)
add("log_normal", lambda x: torch.empty_like(x).log_normal_(), X, grad=False)
add("fused_dropout_bf16", lambda x: F.dropout(x, 0.1), XH)
add("rand_generator", lambda x: x + torch.rand(4096, device="cuda", generator=torch.Generator("cuda")), X)
