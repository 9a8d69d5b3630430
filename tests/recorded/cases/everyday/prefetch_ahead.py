"""Batches of varying length are put on the card two ahead of the one that is trained on: nested dicts of padded tokens
with masks, moved on a stream of their own, handed over with an event; a bidirectional network with pooled states."""

import collections
import itertools
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def to_device(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: to_device(item, device) for name, item in value.items()}
    return value


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [t for item in value.values() for t in tensors(item)]


class AheadOfTime:
    """The next `ahead` batches are on the card, or on their way to it, while one is trained on."""

    def __init__(self, loader, device, ahead=2):
        self.loader, self.device, self.ahead = loader, device, ahead

    def __len__(self):
        return len(self.loader)

    def _move(self, batch, stream):
        with torch.cuda.stream(stream):
            moved = to_device(batch, self.device)
            moved["ids"] = moved["ids"] * moved["mask"]
            return moved, stream.record_event()

    def __iter__(self):
        batches, waiting, stream = iter(self.loader), collections.deque(), torch.cuda.Stream()
        for batch in itertools.islice(batches, self.ahead):
            waiting.append(self._move(batch, stream))
        while waiting:
            batch, event = waiting.popleft()
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for tensor in tensors(batch):
                tensor.record_stream(current)
            yield batch
            for following in itertools.islice(batches, 1):
                waiting.append(self._move(following, stream))


def collate(rows):
    ids = pad_sequence([torch.tensor(row) for row, _ in rows], batch_first=True)
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.tensor([label for _, label in rows])}


class Classifier(nn.Module):
    def __init__(self, vocabulary=5000, width=256):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 5))

    def forward(self, ids, mask):
        states, _ = self.lstm(self.embed(ids))
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.out((states * weights).sum(1) / weights.sum(1))


def main():
    random.seed(3)
    torch.manual_seed(3)
    rows = [([random.randint(1, 4999) for _ in range(random.randint(20, 180))], i % 5) for i in range(6 * 16)]
    loader = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=collate, pin_memory=True)
    model = Classifier().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(2):
        seen = hits = 0
        for batch in AheadOfTime(loader, "cuda"):
            logits = model(batch["ids"], batch["mask"])
            loss = F.cross_entropy(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.argmax(-1) == batch["labels"]).sum().item()
            seen += batch["labels"].numel()
        scheduler.step()
        print(epoch, loss.item(), hits / seen)


if __name__ == "__main__":
    main()
