"""One loop over steps, with an evaluation on larger batches every so often, and the best weights kept on the card."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
STEPS, EVERY = 61, 20
device = torch.device("cuda:0")
model = nn.Sequential(
    nn.Embedding(500, 128), nn.Flatten(), nn.Linear(128 * 32, 1024), nn.ReLU(), nn.Linear(1024, 500)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(size):
    ids = torch.randint(0, 500, (size, 33))
    return ids[:, :-1].to(device), ids[:, -1].to(device)


@torch.no_grad()
def evaluate():
    model.eval()
    losses = []
    for _ in range(4):
        x, y = batch(2048)
        losses.append(nn.functional.cross_entropy(model(x), y))
    model.train()
    return torch.stack(losses).mean()


best = None
for step in range(STEPS):
    if step % EVERY == 0:
        score = evaluate()
        best = copy.deepcopy(model.state_dict())
        print(step, score.item())
    x, y = batch(256)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.load_state_dict(best)
print(evaluate().item())
