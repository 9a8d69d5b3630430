"""Five folds of scikit-learn's KFold, a new network for each, averaged at the end."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Dataset, Subset

DEVICE = "cuda:0"
SEED = 42


class Windows(Dataset):
    def __init__(self, n=230, length=128, channels=12):
        rng = np.random.RandomState(SEED)
        self.x = rng.randn(n, length, channels).astype(np.float32)
        self.y = rng.randint(0, 5, n)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return torch.from_numpy(self.x[index]), int(self.y[index])


class Recogniser(nn.Module):
    def __init__(self, channels=12, width=192, classes=5):
        super().__init__()
        self.project = nn.Linear(channels, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(self.project(x)).mean(dim=1))


dataset = Windows()
kfold = KFold(n_splits=5, shuffle=True, random_state=SEED)
scores = []
for fold, (train_ids, valid_ids) in enumerate(kfold.split(np.arange(len(dataset)))):
    print(f"--- fold {fold + 1}: {len(train_ids)} / {len(valid_ids)}")
    train_loader = DataLoader(Subset(dataset, train_ids), batch_size=46, shuffle=True)
    valid_loader = DataLoader(Subset(dataset, valid_ids), batch_size=92)
    model = Recogniser().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in valid_loader:
                correct += (model(x.to(DEVICE)).argmax(1).cpu() == y).sum().item()
        print(f"epoch {epoch}: {correct / len(valid_ids):.3f}")
    scores.append(correct / len(valid_ids))
print(f"{np.mean(scores):.3f} +- {np.std(scores):.3f}")
