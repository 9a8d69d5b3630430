"""Graph convolutions with a compressed matrix of neighbours, made dense first and then sparse, as tutorials do."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
nodes, features, hidden, classes, edges = 4000, 256, 128, 7, 20000
index = torch.randint(0, nodes, (2, edges))
adjacency = torch.sparse_coo_tensor(index, torch.ones(edges), (nodes, nodes)).coalesce().cuda().to_sparse_csr()
x = torch.randn(nodes, features, device="cuda")
y = torch.randint(0, classes, (nodes,), device="cuda")


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x, a):
        x = F.relu(a @ self.first(x))
        x = F.dropout(x, 0.5, self.training)
        return a @ self.second(x)


model = GCN().cuda()
optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, adjacency), y)
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x, adjacency).argmax(1) == y).float().mean()
    print(epoch, loss.item(), accuracy.item())
