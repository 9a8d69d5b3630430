"""A hyper-parameter search: models built one after another, pruned by their score, memory given back in between."""

import gc
import itertools
import json
import os
import tempfile
from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

SPACE = OrderedDict(depth=[2, 5], width=[256, 1024], optimizer=["adamw", "sgd", "adagrad"], norm=[True])


class Mlp(nn.Module):
    def __init__(self, depth, width, norm, features=40, classes=12):
        super().__init__()
        layers = [nn.Linear(features, width), nn.GELU()]
        for _ in range(depth):
            if norm:
                layers.append(nn.LayerNorm(width))
            layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.Linear(width, classes))

    def forward(self, x):
        return self.net(x)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def __call__(self, loss, model):
        if loss < self.best - 1e-6:
            self.best, self.bad = loss, 0
            self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        else:
            self.bad += 1
        return self.bad >= self.patience


def make_optimizer(name, params):
    if name == "adamw":
        return torch.optim.AdamW(params, lr=3e-4, amsgrad=True)
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.Adagrad(params, lr=0.01)


def trial(config, train_set, val_set, device):
    model = Mlp(config["depth"], config["width"], config["norm"]).to(device)
    optimizer = make_optimizer(config["optimizer"], model.parameters())
    total = 2 * len(train_set) // 100 + 2
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total, cycle_momentum=False)
    stopper, criterion = EarlyStopping(2), nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        for x, y in DataLoader(train_set, 100, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            val = sum(criterion(model(x.to(device)), y.to(device)).item() for x, y in DataLoader(val_set, 500))
        if stopper(val, model):
            break
    model.load_state_dict(stopper.state)
    return model, stopper.best


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    data = TensorDataset(torch.randn(450, 40), torch.randint(0, 12, (450,)))
    train_set, val_set = random_split(data, [0.7, 0.3])
    history, best = [], None
    for values in itertools.product(*SPACE.values()):
        config = dict(zip(SPACE, values))
        try:
            model, score = trial(config, train_set, val_set, device)
        except RuntimeError as error:
            print("failed", config, str(error).splitlines()[0])
            continue
        history.append({**config, "score": score, "parameters": sum(p.numel() for p in model.parameters())})
        if best is None or score < best[0]:
            best = (score, config, {k: v.cpu() for k, v in model.state_dict().items()})
        del model
        gc.collect()
        torch.cuda.empty_cache()
        used, peak = torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20
        print(f"{config}: {score:.3f}, {used:.1f} MiB now, {peak:.1f} MiB at most")
        torch.cuda.reset_peak_memory_stats()
    with open(os.path.join(tempfile.gettempdir(), "history.json"), "w") as file:
        json.dump(history, file)
    final = Mlp(best[1]["depth"], best[1]["width"], best[1]["norm"])
    final.load_state_dict(best[2])
    final.to(device).eval()
    with torch.inference_mode():
        outputs = torch.cat([final(x.to(device)).softmax(-1) for x, _ in DataLoader(data, 128)])
    print(outputs.shape, torch.cuda.max_memory_reserved())


main()
