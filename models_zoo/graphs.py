"""Graph neural networks on plain tensors: a graph convolution and a graph attention network.

Edges are two rows of node numbers; messages are gathered along them and added up at their ends, as graph libraries do
without kernels of their own. The batch is the number of nodes, ten edges each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .recipe import Device, Recipe

FEATURES, HIDDEN, CLASSES, EDGES_PER_NODE = 500, 256, 40, 10


class Convolution(nn.Module):
    """Neighbours' features, normalised by degrees and added up (arXiv 1609.02907)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        degrees = torch.zeros(len(x), device=x.device).index_add(0, target, torch.ones(len(target), device=x.device))
        scale = degrees.clamp(min=1).rsqrt()
        messages = self.linear(x)[source] * (scale[source] * scale[target])[:, None]
        return torch.zeros(len(x), messages.shape[1], device=x.device, dtype=messages.dtype).index_add(
            0, target, messages
        )


class AttentionConvolution(nn.Module):
    """Neighbours' features, weighted by a softmax over each node's edges (arXiv 1710.10903)."""

    def __init__(self, width: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(width, heads * out, bias=False)
        self.from_source, self.to_target = (nn.Parameter(torch.zeros(heads, out)) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        h = self.linear(x).unflatten(1, (self.heads, -1))
        scores = (h * self.from_source).sum(-1)[source] + (h * self.to_target).sum(-1)[target]
        scores = functional.leaky_relu(scores, 0.2)
        index = target[:, None].expand_as(scores)
        highest = torch.full((len(x), self.heads), float("-inf"), device=x.device)
        highest = highest.scatter_reduce(0, index, scores.detach(), "amax")
        weights = (scores - highest[target]).exp()
        total = torch.zeros(len(x), self.heads, device=x.device).index_add(0, target, weights)
        messages = h[source] * (weights / total[target]).unsqueeze(-1)
        return torch.zeros_like(h).index_add(0, target, messages).flatten(1)


class GraphNetwork(nn.Module):
    """Layers of message passing, with an activation and dropout between them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index:
                x = functional.dropout(functional.relu(x), 0.5, self.training)
            x = layer(x, edges)
        return x


def _batch(nodes: int, device: Device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    features = torch.zeros(nodes, FEATURES, device=device)
    edges = torch.zeros(2, EDGES_PER_NODE * nodes, dtype=torch.long, device=device)
    return (features, edges), torch.zeros(nodes, dtype=torch.long, device=device)


gcn = Recipe(
    lambda: GraphNetwork(Convolution(FEATURES, HIDDEN), Convolution(HIDDEN, HIDDEN), Convolution(HIDDEN, CLASSES)),
    _batch,
    functional.cross_entropy,
)
graph_attention = Recipe(
    lambda: GraphNetwork(AttentionConvolution(FEATURES, 64, 4), AttentionConvolution(256, CLASSES, 1)),
    _batch,
    functional.cross_entropy,
)
