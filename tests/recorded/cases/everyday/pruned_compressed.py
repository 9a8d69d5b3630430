"""A weight that is pruned and multiplied as a compressed sparse matrix on the card."""

import torch
from torch import nn

torch.manual_seed(0)
weight = torch.randn(1024, 2048, device="cuda")
weight = torch.where(weight.abs() > 1.5, weight, torch.zeros_like(weight))
sparse = weight.to_sparse_csr()
print(sparse.shape, sparse.layout, sparse.crow_indices().dtype)
head = nn.Linear(1024, 10).cuda()
stem = nn.Linear(512, 2048).cuda()
optimizer = torch.optim.SGD([*head.parameters(), *stem.parameters()], 0.1, momentum=0.9)
for _ in range(4):
    x = torch.randn(64, 512, device="cuda")
    h = torch.relu(stem(x))
    h = torch.sparse.mm(sparse, h.t()).t()
    loss = nn.functional.cross_entropy(head(h), torch.randint(10, (64,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(float(loss))
