"""Node classification with GAT, then graphs of many sizes with GIN and pooling: torch_geometric, masks, early stopping."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import BatchNorm, GATConv, GINConv, SAGEConv, global_add_pool, global_mean_pool
from torch_geometric.utils import add_self_loops, dropout_edge, to_undirected

parser = argparse.ArgumentParser()
parser.add_argument("--hidden_channels", type=int, default=32)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()
torch.manual_seed(12345)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GAT(torch.nn.Module):
    def __init__(self, i, h, o, heads):
        super().__init__()
        self.conv1 = GATConv(i, h, heads, dropout=0.6)
        self.conv2 = GATConv(h * heads, o, heads=1, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(F.dropout(x, p=0.6, training=self.training), edge_index))
        return self.conv2(F.dropout(x, p=0.6, training=self.training), edge_index)


n = 2700
edge_index = to_undirected(torch.randint(0, n, (2, 5200)), num_nodes=n)
data = Data(x=torch.randn(n, 500), edge_index=edge_index, y=torch.randint(0, 7, (n,)))
perm = torch.randperm(n)
for name, rows in (("train_mask", perm[:140]), ("val_mask", perm[140:640]), ("test_mask", perm[640:1640])):
    mask = torch.zeros(n, dtype=torch.bool)
    mask[rows] = True
    data[name] = mask
data = data.to(device)
model = GAT(500, args.hidden_channels, 7, args.heads).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    edges, _ = dropout_edge(data.edge_index, p=0.0, training=True)
    out = model(data.x, edges)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    return [int((pred[m] == data.y[m]).sum()) / int(m.sum()) for m in (data.train_mask, data.val_mask, data.test_mask)]


best_val = final = -1.0
for epoch in range(1, args.epochs + 1):
    loss = train()
    tr, va, te = test()
    if va > best_val:
        best_val, final, kept = va, te, copy.deepcopy(model.state_dict())
    print(f"{epoch:03d} {loss:.4f} {tr:.3f} {va:.3f} {te:.3f}")
model = optimizer = data = None


class GIN(torch.nn.Module):
    def __init__(self, i, h, o):
        super().__init__()
        mlp = lambda a: torch.nn.Sequential(
            torch.nn.Linear(a, h), torch.nn.BatchNorm1d(h), torch.nn.ReLU(), torch.nn.Linear(h, h), torch.nn.ReLU()
        )
        self.c1, self.c2, self.c3 = GINConv(mlp(i)), GINConv(mlp(h)), SAGEConv(h, h)
        self.norm, self.lin1, self.lin2 = BatchNorm(h), torch.nn.Linear(2 * h, h), torch.nn.Linear(h, o)

    def forward(self, x, edge_index, batch):
        x = self.c2(self.c1(x, edge_index), edge_index)
        x = self.norm(self.c3(x, edge_index)).relu()
        x = torch.cat([global_mean_pool(x, batch), global_add_pool(x, batch)], 1)
        return self.lin2(F.dropout(self.lin1(x).relu(), p=0.5, training=self.training))


graphs = []
for _ in range(200):
    k = int(torch.randint(10, 120, (1,)))
    e, _ = add_self_loops(torch.randint(0, k, (2, k * 3)), num_nodes=k)
    graphs.append(Data(x=torch.randn(k, 32), edge_index=e, y=torch.randint(0, 2, (1,))))
train_loader, test_loader = (
    DataLoader(graphs[:150], batch_size=32, shuffle=True),
    DataLoader(graphs[150:], batch_size=64),
)
model = GIN(32, 128, 2).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    model.train()
    total = 0.0
    for batch in train_loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
        loss.backward()
        optimizer.step()
        total += loss.item() * batch.num_graphs
    model.eval()
    correct = 0
    for batch in test_loader:
        batch = batch.to(device)
        with torch.no_grad():
            correct += int((model(batch.x, batch.edge_index, batch.batch).argmax(1) == batch.y).sum())
    print(epoch, total / 150, correct / 50)
