"""A grid search over width, depth and learning rate of a tabular network, the best of which is trained once more."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

device = torch.device("cuda")
torch.manual_seed(7)
features = torch.randn(1200, 96)
targets = (features[:, :4].sum(1, keepdim=True) + 0.1 * torch.randn(1200, 1)).float()
train_set, val_set = random_split(TensorDataset(features, targets), [1000, 200])
train_loader = DataLoader(train_set, batch_size=250, shuffle=True)
val_loader = DataLoader(val_set, batch_size=200)


class MLP(nn.Module):
    def __init__(self, width, depth, dropout=0.1):
        super().__init__()
        layers, size = [], 96
        for _ in range(depth):
            layers += [nn.Linear(size, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)]
            size = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(size, 1)

    def forward(self, x):
        return self.head(self.body(x))


def fit(config, epochs):
    model = MLP(config["width"], config["depth"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    best = float("inf")
    for epoch in range(epochs):
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                total += nn.functional.mse_loss(model(x.to(device)), y.to(device), reduction="sum").item()
        best = min(best, total / len(val_set))
    return best, model


grid = {"width": [256, 1024, 2048], "depth": [2, 4], "lr": [1e-3, 3e-4]}
results = []
for values in itertools.product(*grid.values()):
    config = dict(zip(grid.keys(), values))
    score, _ = fit(config, epochs=2)
    results.append((score, config))
    print(config, score)
best_score, best_config = min(results, key=lambda r: r[0])
score, model = fit(best_config, epochs=3)
torch.cuda.synchronize()
print("final", best_config, score)
