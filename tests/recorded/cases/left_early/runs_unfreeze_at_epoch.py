"""Gradual unfreezing inside the loop over epochs: some more layers, and a new optimizer, at two of them."""

import torch
import torch.nn as nn
from timm import create_model
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, UNFREEZE = 6, {2: "blocks.2", 4: ""}

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3, 96, 96), torch.randint(0, 20, (64,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = create_model("vit_tiny_patch16_224", img_size=96, depth=4, num_classes=20).cuda()
for name, parameter in model.named_parameters():
    parameter.requires_grad = name.startswith("head")


def make_optimizer():
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.05)


optimizer = make_optimizer()
criterion = nn.CrossEntropyLoss()
for epoch in range(EPOCHS):
    if epoch in UNFREEZE:
        for name, parameter in model.named_parameters():
            if name >= UNFREEZE[epoch]:
                parameter.requires_grad = True
        optimizer = make_optimizer()
    running = 0.0
    for images, labels in loader:
        images, labels = images.cuda(), labels.cuda()
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch}: {running / len(loader):.3f}")
