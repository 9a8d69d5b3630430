"""Seq2seq with a GRU and Bahdanau attention, teacher forcing at random."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random.seed(5)
np.random.seed(5)
torch.manual_seed(5)
MAX_LENGTH, SOS, EOS, VOC_IN, VOC_OUT, HIDDEN, BATCH = 10, 0, 1, 2800, 4300, 128, 32


class EncoderRNN(nn.Module):
    def __init__(self, n, h, p=0.1):
        super().__init__()
        self.embedding, self.gru, self.dropout = nn.Embedding(n, h), nn.GRU(h, h, batch_first=True), nn.Dropout(p)

    def forward(self, x):
        return self.gru(self.dropout(self.embedding(x)))


class BahdanauAttention(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, h, n, p=0.1):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(n, h), BahdanauAttention(h)
        self.gru, self.out, self.dropout = nn.GRU(2 * h, h, batch_first=True), nn.Linear(h, n), nn.Dropout(p)

    def forward(self, enc, hidden, target=None):
        b = enc.size(0)
        inp = torch.empty(b, 1, dtype=torch.long, device=device).fill_(SOS)
        outs, attentions = [], []
        for i in range(MAX_LENGTH):
            embedded = self.dropout(self.embedding(inp))
            context, w = self.attention(hidden.permute(1, 0, 2), enc)
            output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
            output = self.out(output)
            outs.append(output)
            attentions.append(w)
            if target is not None and random.random() < 0.5:
                inp = target[:, i].unsqueeze(1)
            else:
                _, topi = output.topk(1)
                inp = topi.squeeze(-1).detach()
        return F.log_softmax(torch.cat(outs, dim=1), dim=-1), hidden, torch.cat(attentions, dim=1)


def get_dataloader():
    n = 110
    src, tgt = np.zeros((n, MAX_LENGTH), dtype=np.int32), np.zeros((n, MAX_LENGTH), dtype=np.int32)
    for k in range(n):
        a, b = random.randint(2, MAX_LENGTH), random.randint(2, MAX_LENGTH)
        src[k, :a], tgt[k, :b] = np.random.randint(2, VOC_IN, a), np.random.randint(2, VOC_OUT, b)
    data = TensorDataset(torch.LongTensor(src).to(device), torch.LongTensor(tgt).to(device))
    return DataLoader(data, sampler=RandomSampler(data), batch_size=BATCH)


encoder, decoder = EncoderRNN(VOC_IN, HIDDEN).to(device), AttnDecoderRNN(HIDDEN, VOC_OUT).to(device)
loader = get_dataloader()
e_opt, d_opt, criterion = (
    optim.Adam(encoder.parameters(), lr=1e-3),
    optim.Adam(decoder.parameters(), lr=1e-3),
    nn.NLLLoss(),
)
total = 0
for x, y in loader:
    e_opt.zero_grad()
    d_opt.zero_grad()
    enc, h = encoder(x)
    out, _, _ = decoder(enc, h, y)
    loss = criterion(out.view(-1, out.size(-1)), y.view(-1))
    loss.backward()
    e_opt.step()
    d_opt.step()
    total += loss.item()
print(total / len(loader))
encoder.eval()
decoder.eval()
with torch.no_grad():
    enc, h = encoder(torch.randint(2, VOC_IN, (1, 7), device=device))
    out, _, _ = decoder(enc, h)
    words = []
    for idx in out.topk(1)[1].squeeze():
        if idx.item() == EOS:
            break
        words.append(idx.item())
    print(len(words))
