"""Optuna: a study over sizes of a convolutional network, and a last training with what it found."""

import optuna
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cuda")
CLASSES, TRIALS, EPOCHS = 10, 6, 2
g = torch.Generator().manual_seed(0)
train_loader = DataLoader(
    TensorDataset(torch.randn(480, 1, 28, 28, generator=g), torch.randint(0, CLASSES, (480,), generator=g)),
    batch_size=96,
    shuffle=True,
)
valid_loader = DataLoader(
    TensorDataset(torch.randn(192, 1, 28, 28, generator=g), torch.randint(0, CLASSES, (192,), generator=g)),
    batch_size=192,
)


def define_model(channels, units, dropout):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 144, units),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(units, CLASSES),
    )


def fit(model, optimizer, epochs, trial=None):
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for data, target in train_loader:
            data, target = data.to(DEVICE), target.to(DEVICE)
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in valid_loader:
                pred = model(data.to(DEVICE)).argmax(dim=1)
                correct += pred.eq(target.to(DEVICE)).sum().item()
        accuracy = correct / len(valid_loader.dataset)
        if trial is not None:
            trial.report(accuracy, epoch)
    return accuracy


def objective(trial):
    channels = trial.suggest_categorical("channels", [16, 32, 64])
    units = trial.suggest_int("units", 64, 512, step=64)
    model = define_model(channels, units, trial.suggest_float("dropout", 0.1, 0.5)).to(DEVICE)
    name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    return fit(model, optimizer, EPOCHS, trial)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=11))
    study.optimize(objective, n_trials=TRIALS)
    best = study.best_params
    print(len(study.trials), best)
    model = define_model(64, best["units"], best["dropout"]).to(DEVICE)
    print(fit(model, torch.optim.Adam(model.parameters(), lr=best["lr"]), 1))
