"""Tied embeddings whose one gradient is scaled and watched by hooks, registered while the model is on the host."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Tied(nn.Module):
    def __init__(self, vocabulary=16000, width=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids)))


torch.manual_seed(0)
model = Tied()
seen = {}
for name, p in model.named_parameters():
    p.register_hook(lambda grad: torch.where(grad.abs() > 1e-8, grad * 0.1, grad))
    p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.float().norm()))
model.head.weight.register_hook(lambda grad: grad / 2)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.cuda()
assert model.head.weight is model.embedding.weight

for epoch in range(2):
    for _ in range(3):
        ids = torch.randint(0, 16000, (8, 64)).cuda()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    print(epoch, len(seen), "norms")
