"""Translation with batches of as many tokens each, made beforehand and sorted by length, without a loader."""

import random

import torch
from torch import nn

device = torch.device("cuda")
TOKENS, PAD = 1536, 0


def make_pairs(count=260, seed=1):
    draw = random.Random(seed)
    for _ in range(count):
        length = draw.randint(5, 96)
        yield (
            [draw.randrange(1, 4000) for _ in range(length)],
            [draw.randrange(1, 4000) for _ in range(max(3, int(length * draw.uniform(0.7, 1.5))))],
        )


def batches(pairs):
    pairs = sorted(pairs, key=lambda pair: len(pair[0]))
    batch, longest = [], 0
    for pair in pairs:
        longest = max(longest, len(pair[0]), len(pair[1]))
        if batch and longest * (len(batch) + 1) > TOKENS:
            yield batch
            batch, longest = [], max(len(pair[0]), len(pair[1]))
        batch.append(pair)
    yield batch


def padded(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


class Translator(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.source, self.target = nn.Embedding(4000, width), nn.Embedding(4000, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)
        self.head = nn.Linear(width, 4000)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


all_batches = [(padded([s for s, _ in b]), padded([t for _, t in b])) for b in batches(make_pairs())]
model = Translator().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
for epoch in range(1):
    for i, (source, target) in enumerate(all_batches):
        source, target = source.to(device), target.to(device)
        logits = model(source, target[:, :-1])
        loss = loss_fn(logits.reshape(-1, 4000), target[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(epoch, len(all_batches), loss.item())
