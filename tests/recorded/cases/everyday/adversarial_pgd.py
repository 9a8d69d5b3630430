"""Adversarial training (torchattacks): a wide residual network taught on attacked pictures, judged under three attacks."""

import torch
import torchattacks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Wide(nn.Module):
    class Block(nn.Module):
        def __init__(self, a, b, stride):
            super().__init__()
            self.first, self.second = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(a), nn.BatchNorm2d(b)])
            self.short = nn.Conv2d(a, b, 1, stride, bias=False) if a != b else nn.Identity()

        def forward(self, x):
            y = torch.relu(self.norms[0](x))
            return self.short(y) + self.second(torch.relu(self.norms[1](self.first(y))))

    def __init__(self, width=4):
        super().__init__()
        widths = [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.body = nn.Sequential(
            *(
                self.Block(a if i == 0 else b, b, s if i == 0 else 1)
                for a, b, s in zip(widths, widths[1:], (1, 2, 2))
                for i in (0, 1)
            )
        )
        self.norm, self.head = nn.BatchNorm2d(widths[-1]), nn.Linear(widths[-1], 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(self.stem(x)))).mean((2, 3)))


train = DataLoader(TensorDataset(torch.rand(192, 3, 32, 32), torch.randint(0, 10, (192,))), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(torch.rand(64, 3, 32, 32), torch.randint(0, 10, (64,))), batch_size=64)
model = Wide().cuda()
attack = torchattacks.PGD(model, eps=8 / 255, alpha=2 / 255, steps=4, random_start=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    model.train()
    for images, labels in train:
        images, labels = images.cuda(), labels.cuda()
        attacked = attack(images, labels)
        loss = 0.5 * (criterion(model(images), labels) + criterion(model(attacked), labels))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    scores = {}
    for judge in (torchattacks.FGSM(model, eps=8 / 255), attack, torchattacks.TPGD(model, steps=3)):
        right = 0
        for images, labels in test:
            attacked = judge(images, labels)
            with torch.no_grad():
                right += (model(attacked).argmax(1).cpu() == labels).sum().item()
        scores[type(judge).__name__] = right / 64
    print(epoch, f"{loss.item():.3f}", scores)
    torch.save(model.state_dict(), "robust.pt")
