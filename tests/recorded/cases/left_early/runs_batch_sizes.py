"""Which batch size is fastest: one function trains with each of a few, as people write it before a long run."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"


def block(c_in, c_out):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    )


def make_model():
    return nn.Sequential(
        block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
    )


def train(batch_size, epochs=1):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 3, 64, 64), torch.randint(0, 10, (320,)))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    start, seen = time.time(), 0
    for epoch in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            seen += len(images)
    return seen / (time.time() - start)


for bs in (8, 16, 64):
    torch.cuda.reset_peak_memory_stats()
    speed = train(bs)
    print(f"batch {bs}: {speed:.0f} images/s, {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
