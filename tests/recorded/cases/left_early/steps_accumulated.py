"""Gradients of four micro-batches accumulated, the remainder of an epoch too; accuracy on a larger validation batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
ACCUMULATE, EPOCHS = 4, 3
train = DataLoader(TensorDataset(torch.randn(1000, 784), torch.randint(0, 10, (1000,))), batch_size=50, shuffle=True)
valid = DataLoader(TensorDataset(torch.randn(1500, 784), torch.randint(0, 10, (1500,))), batch_size=750)
model = nn.Sequential(
    nn.Linear(784, 2048), nn.GELU(), nn.Dropout(0.2), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 10)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=EPOCHS * 5)
criterion = nn.CrossEntropyLoss()
for epoch in range(EPOCHS):
    model.train()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(train):
        loss = criterion(model(x.cuda()), y.cuda()) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0 or i + 1 == len(train):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in valid:
            logits = model(x.cuda())
            correct += (logits.argmax(1) == y.cuda()).sum().item()
    print(f"epoch {epoch}: {correct / 1500:.3f}")
