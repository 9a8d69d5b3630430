"""Transfer learning in two phases: the head alone, then everything with a new optimizer and the same loaders."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms


class Pictures(Dataset):
    def __init__(self, count, seed):
        self.seed, self.count = seed, count
        self.transform = transforms.Compose(
            [transforms.RandomHorizontalFlip(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
        )

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        return self.transform(torch.rand(3, 160, 160, generator=g)), i % 7


def run_epoch(model, loader, criterion, optimizer=None):
    training = optimizer is not None
    model.train(training)
    losses, count = 0.0, 0
    with torch.set_grad_enabled(training):
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            outputs = model(images)
            loss = criterion(outputs, labels)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses += loss.item() * len(images)
            count += len(images)
    return losses / count


def fit(model, loaders, epochs, lr):
    parameters = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in parameters):,} trainable parameters")
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        train_loss = run_epoch(model, loaders["train"], criterion, optimizer)
        val_loss = run_epoch(model, loaders["val"], criterion)
        print(f"{epoch + 1}/{epochs}: {train_loss:.4f} {val_loss:.4f}")


def main():
    loaders = {
        "train": DataLoader(Pictures(120, 0), batch_size=24, shuffle=True, num_workers=2, pin_memory=True),
        "val": DataLoader(Pictures(48, 1000), batch_size=48, num_workers=2, pin_memory=True),
    }
    model = models.resnet34(weights=None)
    model.fc = nn.Linear(model.fc.in_features, 7)
    model = model.cuda()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("fc")
    fit(model, loaders, epochs=1, lr=1e-3)
    for parameter in model.parameters():
        parameter.requires_grad = True
    fit(model, loaders, epochs=1, lr=1e-4)


if __name__ == "__main__":
    main()
