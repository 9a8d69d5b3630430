"""Texts of many lengths, padded batch by batch; those that come first are short."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

LENGTHS = [64, 60, 61, 96, 90, 80, 128, 100, 120, 77, 300, 200, 512, 400, 480, 150, 33, 20, 340, 222, 250, 90]
device = "cuda" if torch.cuda.is_available() else "cpu"


class Texts(Dataset):
    def __init__(self, repeat=4):
        self.lengths = [length for length in LENGTHS for _ in range(repeat)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randint(1, 8000, (self.lengths[i],), generator=g), i % 4


def collate(rows):
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    return ids, torch.tensor([label for _, label in rows])


class Classifier(nn.Module):
    def __init__(self, width=384, heads=6, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(8000, width, padding_idx=0)
        self.position = nn.Parameter(torch.zeros(512, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, ids):
        h = self.embedding(ids) + self.position[: ids.shape[1]]
        return self.head(self.encoder(h, src_key_padding_mask=ids.eq(0))[:, 0])


loader = DataLoader(Texts(), batch_size=12, collate_fn=collate)
model = Classifier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
criterion = nn.CrossEntropyLoss()
for epoch in range(2):
    for step, (ids, labels) in enumerate(loader):
        ids, labels = ids.to(device), labels.to(device)
        loss = criterion(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            print(epoch, step, tuple(ids.shape), loss.item())
