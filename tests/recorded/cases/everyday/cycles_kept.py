"""Objects that hold each other and tensors of the card, a few a step: they die when Python looks for garbage."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Node:
    """A part of a tree that knows its parent, as parsers and games make them."""

    def __init__(self, parent, state):
        self.parent, self.state, self.children = parent, state, []
        if parent is not None:
            parent.children.append(self)


class Tree(nn.Module):
    def __init__(self, dim=256, depth=3):
        super().__init__()
        self.depth = depth
        self.split, self.merge = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def grow(self, node, depth):
        if depth:
            for state in self.split(node.state).tanh().chunk(2, 1):
                self.grow(Node(node, state), depth - 1)
        return node

    def forward(self, x):
        return self.fold(self.grow(Node(None, x), self.depth))

    def fold(self, node):
        if not node.children:
            return node.state
        return self.merge(torch.cat([self.fold(child) for child in node.children], 1)) + node.state


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(3072, 256), torch.randn(3072, 256)), batch_size=64, shuffle=True)
model = Tree().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, total / len(loader))
