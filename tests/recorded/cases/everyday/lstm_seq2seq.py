"""Seq2seq with LSTM cells by hand and Luong attention, teacher forcing decided by the host's random numbers, BLEU-like score."""

import math
import os
import random
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 1234
random.seed(SEED)
torch.manual_seed(SEED)
device = torch.device("cuda")
SRC, TRG, PAD, SOS, EOS = 3500, 4500, 0, 1, 2


class Encoder(nn.Module):
    def __init__(self, e=192, h=256):
        super().__init__()
        self.embedding, self.fwd, self.bwd, self.fc = (
            nn.Embedding(SRC, e, padding_idx=PAD),
            nn.LSTMCell(e, h),
            nn.LSTMCell(e, h),
            nn.Linear(2 * h, h),
        )
        self.h, self.dropout = h, nn.Dropout(0.3)

    def run(self, cell, emb, order):
        h = c = torch.zeros(emb.size(1), self.h, device=emb.device)
        out = [None] * len(order)
        for t in order:
            h, c = cell(emb[t], (h, c))
            out[t] = h
        return torch.stack(out), h

    def forward(self, src):
        emb = self.dropout(self.embedding(src))
        f, hf = self.run(self.fwd, emb, list(range(len(src))))
        b, hb = self.run(self.bwd, emb, list(reversed(range(len(src)))))
        return self.fc(torch.cat([f, b], -1)), torch.tanh(self.fc(torch.cat([hf, hb], -1)))


class Decoder(nn.Module):
    def __init__(self, e=192, h=256):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(TRG, e), nn.LSTMCell(e + h, h)
        self.attn, self.out = nn.Linear(h, h, bias=False), nn.Linear(2 * h + e, TRG)

    def forward(self, token, state, enc, mask):
        emb = self.embedding(token)
        score = torch.einsum("bh,sbh->bs", self.attn(state[0]), enc).masked_fill(mask == 0, -1e10)
        context = torch.einsum("bs,sbh->bh", F.softmax(score, dim=1), enc)
        h, c = self.cell(torch.cat([emb, context], 1), state)
        return self.out(torch.cat([h, context, emb], 1)), (h, c)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, src, trg, ratio=0.5):
        enc, h = self.encoder(src)
        mask = (src != PAD).permute(1, 0)
        outputs = torch.zeros(trg.shape[0], trg.shape[1], TRG).to(device)
        token, state = trg[0], (h, torch.zeros_like(h))
        for t in range(1, trg.shape[0]):
            out, state = self.decoder(token, state, enc, mask)
            outputs[t] = out
            token = trg[t] if random.random() < ratio else out.argmax(1)
        return outputs


def bucket_batches(n, size):
    pairs = []
    for _ in range(n):
        k = random.randint(5, 30)
        pairs.append(
            (
                [random.randrange(3, SRC) for _ in range(k)] + [EOS],
                [SOS] + [random.randrange(3, TRG) for _ in range(max(3, k + random.randint(-3, 3)))] + [EOS],
            )
        )
    pairs.sort(key=lambda p: len(p[0]))
    batches = [pairs[i : i + size] for i in range(0, n, size)]
    random.shuffle(batches)
    for batch in batches:
        s, t = max(len(p[0]) for p in batch), max(len(p[1]) for p in batch)
        yield (
            torch.tensor([p[0] + [PAD] * (s - len(p[0])) for p in batch]).t().to(device),
            torch.tensor([p[1] + [PAD] * (t - len(p[1])) for p in batch]).t().to(device),
        )


model = Seq2Seq().to(device)
model.apply(lambda m: [nn.init.uniform_(p.data, -0.08, 0.08) for p in m.parameters(recurse=False)])
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
best = float("inf")
for epoch in range(1):
    model.train()
    total = 0.0
    for src, trg in bucket_batches(200, 32):
        optimizer.zero_grad()
        output = model(src, trg)
        loss = criterion(output[1:].view(-1, TRG), trg[1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        val = sum(
            criterion(model(s, t, 0)[1:].view(-1, TRG), t[1:].reshape(-1)).item() for s, t in bucket_batches(64, 32)
        )
    if val < best:
        best = val
        torch.save(model.state_dict(), os.path.join(tempfile.mkdtemp(), "seq2seq.pt"))
    print(f"epoch {epoch} train {total:.3f} ppl {math.exp(min(val, 20)):.1f}")
