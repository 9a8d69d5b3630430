"""Names in sentences by a BiLSTM with a conditional random field (torchcrf): lengths vary, batches are packed."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader
from torchcrf import CRF

random.seed(0), torch.manual_seed(0)
VOCABULARY, TAGS = 8000, ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]


def sentence():
    n = random.randint(8, 48)
    return torch.randint(1, VOCABULARY, (n,)), torch.randint(0, len(TAGS), (n,))


def collate(batch):
    batch = sorted(batch, key=lambda pair: -len(pair[0]))
    words, tags = zip(*batch)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True), lengths


class Tagger(nn.Module):
    def __init__(self, dim=200, hidden=512):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden // 2, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.emit, self.crf = nn.Linear(hidden, len(TAGS)), CRF(len(TAGS), batch_first=True)

    def emissions(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True)
        return self.emit(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])

    def loss(self, words, tags, lengths):
        return -self.crf(self.emissions(words, lengths), tags, mask=words > 0, reduction="mean")

    def decode(self, words, lengths):
        return self.crf.decode(self.emissions(words, lengths), mask=words > 0)


train = DataLoader([sentence() for _ in range(512)], batch_size=64, shuffle=True, collate_fn=collate)
test = DataLoader([sentence() for _ in range(100)], batch_size=50, collate_fn=collate)
model = Tagger().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + 0.05 * epoch))
for epoch in range(2):
    model.train()
    for words, tags, lengths in train:
        loss = model.loss(words.cuda(), tags.cuda(), lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    scheduler.step()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for words, tags, lengths in test:
            for path, truth, n in zip(model.decode(words.cuda(), lengths), tags.tolist(), lengths.tolist()):
                right, total = right + sum(a == b for a, b in zip(path, truth[:n])), total + n
    print(f"epoch {epoch} loss {loss.item():.2f} accuracy {right / max(total, 1):.2%}")
    torch.save(model.state_dict(), "tagger.pt")
