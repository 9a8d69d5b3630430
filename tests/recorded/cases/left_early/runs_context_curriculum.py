"""A character model whose context grows with the epochs: the sequence length follows from the epoch's number."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, EPOCHS, DEVICE = 256, 4, "cuda"


class Chunks(Dataset):
    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return 40

    def __getitem__(self, i):
        start = (i * 997) % (len(self.text) - self.length - 1)
        chunk = self.text[start : start + self.length + 1]
        return chunk[:-1], chunk[1:]


class Model(nn.Module):
    def __init__(self, width=256, layers=3, heads=8, most=512):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(most, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x):
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        h = self.tokens(x) + self.positions(torch.arange(length, device=x.device))
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(h)


text = torch.randint(0, VOCABULARY, (20_000,), generator=torch.Generator().manual_seed(0))
model = Model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for epoch in range(EPOCHS):
    length = min(64 * 2**epoch, 512)
    loader = DataLoader(Chunks(text, length), batch_size=8, shuffle=True)
    for x, y in loader:
        x, y = x.to(DEVICE), y.to(DEVICE)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}, context {length}: perplexity {math.exp(min(20.0, loss.item())):.1f}")
