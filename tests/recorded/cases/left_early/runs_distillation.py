"""A large network is trained, then a small one by it: two functions, the same loaders, the teacher kept."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [512] + [width] * depth
        self.body = nn.Sequential(*[m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())])
        self.head = nn.Linear(width, 100)

    def forward(self, x):
        return self.head(self.body(x))


def train(model, loader, epochs, lr, device):
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for epoch in range(epochs):
        running = 0.0
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
        print(f"epoch {epoch + 1}/{epochs}: {running / len(loader)}")


def distill(teacher, student, loader, epochs, lr, T, device):
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(inputs)
            logits = student(inputs)
            soft = F.kl_div(F.log_softmax(logits / T, -1), F.softmax(wanted / T, -1), reduction="batchmean") * T**2
            loss = 0.25 * soft + 0.75 * F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
        print(f"distilled {epoch + 1}/{epochs}")


def test(model, loader, device):
    model.eval()
    with torch.no_grad():
        correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    print(f"accuracy {100 * correct / len(loader.dataset):.1f} %")
    return correct


if __name__ == "__main__":
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    make = lambda n: TensorDataset(torch.randn(n, 512), torch.randint(0, 100, (n,)))
    loaders = DataLoader(make(1280), 128, shuffle=True), DataLoader(make(600), 256)
    torch.manual_seed(42)
    teacher = Net(2048, 5).to(device)
    train(teacher, loaders[0], 3, 1e-3, device)
    test(teacher, loaders[1], device)
    student = Net(512, 2).to(device)
    distill(teacher, student, loaders[0], 3, 1e-3, 2, device)
    test(student, loaders[1], device)
