"""A deep learning recommendation model (arXiv 1906.00091): embedding bags, perceptrons, pairwise products."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from .recipe import Device, Recipe

DENSE_FEATURES, TABLES, ROWS, WIDTH, LOOKUPS = 13, 26, 100_000, 64, 4


class Recommender(nn.Module):
    """Click probability from dense features and bags of categorical ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom = _perceptron(DENSE_FEATURES, 512, 256, WIDTH)
        pairs = (TABLES + 1) * TABLES // 2
        self.top = _perceptron(WIDTH + pairs, 512, 256)
        self.score = nn.Linear(256, 1)
        lower = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        self.register_buffer("pairs", lower[0] * (TABLES + 1) + lower[1], persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        features = [self.bottom(dense)]
        features += [table(categories[index]) for index, table in enumerate(self.tables)]
        stacked = torch.stack(features, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.score(self.top(torch.cat([features[0], products], 1))).squeeze(1)


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide_in, wide_out in pairwise(widths):
        layers += [nn.Linear(wide_in, wide_out), nn.ReLU()]
    return nn.Sequential(*layers)


def _batch(batch: int, device: Device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    dense = torch.zeros(batch, DENSE_FEATURES, device=device)
    categories = torch.zeros(TABLES, batch, LOOKUPS, dtype=torch.long, device=device)
    return (dense, categories), torch.zeros(batch, device=device)


dlrm = Recipe(Recommender, _batch, functional.binary_cross_entropy_with_logits)
