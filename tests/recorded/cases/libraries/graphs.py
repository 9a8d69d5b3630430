"""PyTorch Geometric: graph convolutions on a random graph, whole and in mini-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.recorded.cases.libraries.registry import program

_NODES, _EDGES, _FEATURES, _CLASSES = 4000, 20_000, 256, 7


def _graph(nodes: int = _NODES, edges: int = _EDGES, loops: bool = True) -> Any:
    """Random edges with a few self-loops and duplicates; training, validation and test nodes by masks."""
    from torch_geometric.data import Data

    draws = torch.Generator().manual_seed(1)
    ends = torch.randint(nodes, (2, edges), generator=draws)
    if loops:
        ends[1, :50] = ends[0, :50]
    part = torch.randint(10, (nodes,), generator=draws)
    return Data(
        x=torch.rand(nodes, _FEATURES, generator=draws),
        edge_index=ends,
        y=torch.randint(_CLASSES, (nodes,), generator=draws),
        train_mask=part < 6,
        val_mask=part == 6,
        test_mask=part > 6,
    )


def _network(kind: str, hidden: int = 128) -> Any:
    from torch import nn
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = 0.5
            self.first: Any
            self.second: Any
            if kind == "gat":
                self.first, self.second = GATConv(_FEATURES, 16, heads=8), GATConv(128, _CLASSES, heads=1, concat=False)
            else:
                convolution = {"gcn": GCNConv, "sage": SAGEConv}[kind]
                self.first, self.second = convolution(_FEATURES, hidden), convolution(hidden, _CLASSES)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            x = functional.dropout(x, self.dropout, self.training)
            x = functional.relu(self.first(x, edge_index))
            x = functional.dropout(x, self.dropout, self.training)
            return self.second(x, edge_index)

    return Network()


def _full_batch(kind: str) -> None:
    """``examples/gcn.py``: the whole graph in every epoch, then the accuracies of three masks."""
    import torch_geometric.transforms as transforms
    from torch_geometric import seed_everything

    seed_everything(12345)
    data = transforms.NormalizeFeatures()(_graph()).to("cuda")
    model = _network(kind).to("cuda")
    optimizer = torch.optim.Adam(
        [
            {"params": model.first.parameters(), "weight_decay": 5e-4},
            {"params": model.second.parameters(), "weight_decay": 0},
        ],
        lr=0.01,
    )
    for epoch in range(3):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            predicted = model(data.x, data.edge_index).argmax(dim=-1)
            accuracies = [
                int((predicted[mask] == data.y[mask]).sum()) / int(mask.sum())
                for mask in (data.train_mask, data.val_mask, data.test_mask)
            ]
        print(epoch, float(loss), accuracies)


@program("torch_geometric")
def geometric_gcn() -> None:
    _full_batch("gcn")


@program("torch_geometric")
def geometric_sage() -> None:
    _full_batch("sage")


@program("torch_geometric")
def geometric_gat() -> None:
    _full_batch("gat")


@program("torch_geometric")
def geometric_graph_batches() -> None:
    """``examples/mutag_gin.py``: many small graphs, batched, pooled, classified; batches differ in size."""
    from torch import nn
    from torch_geometric import seed_everything
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GINConv, global_add_pool, global_mean_pool

    seed_everything(0)
    graphs = []
    for index in range(60):
        graph = _graph(nodes=20 + 7 * index, edges=60 + 20 * index, loops=False)
        del graph.train_mask, graph.val_mask, graph.test_mask
        graph.y = torch.tensor([index % 3])
        graphs.append(graph)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def layer(inputs: int) -> Any:
                return GINConv(
                    nn.Sequential(nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256))
                )

            self.layers = nn.ModuleList([layer(_FEATURES), layer(256), layer(256)])
            self.head = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 3))

        def forward(self, data: Any) -> torch.Tensor:
            x = data.x
            for layer in self.layers:
                x = layer(x, data.edge_index).relu()
            pooled = [global_add_pool(x, data.batch), global_mean_pool(x, data.batch)]
            return self.head(torch.cat(pooled, dim=1))

    model = Network().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train = DataLoader(graphs[:48], batch_size=16, shuffle=True)
    held = DataLoader(graphs[48:], batch_size=8)
    for epoch in range(2):
        model.train()
        total = torch.zeros((), device="cuda")
        for data in train:
            data = data.to("cuda")
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data), data.y)
            loss.backward()
            optimizer.step()
            total += loss.detach() * data.num_graphs
        model.eval()
        correct = 0
        with torch.no_grad():
            for data in held:
                data = data.to("cuda")
                correct += int((model(data).argmax(dim=-1) == data.y).sum())
        print(epoch, float(total), correct)
