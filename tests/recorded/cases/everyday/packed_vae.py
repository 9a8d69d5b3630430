"""A sentence VAE: packed sequences sorted by length, KL annealing, word dropout, greedy decoding by a GRU cell."""

import os
import random
import tempfile
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.utils.rnn as rnn_utils
from torch.utils.data import DataLoader, Dataset

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
to = lambda x: x.cuda() if torch.cuda.is_available() else x


class Sentences(Dataset):
    def __init__(self, n, maxlen=30, vocab=1500):
        self.rows = []
        for _ in range(n):
            k = np.random.randint(4, maxlen)
            self.rows.append(
                {
                    "input": np.pad(np.random.randint(4, vocab, k), (0, maxlen - k)),
                    "target": np.pad(np.random.randint(4, vocab, k), (0, maxlen - k)),
                    "length": k,
                }
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {k: np.asarray(v) for k, v in self.rows[i].items()}


class SentenceVAE(nn.Module):
    def __init__(self, vocab=1500, e=128, h=256, z=16):
        super().__init__()
        self.embedding, self.embedding_dropout, self.vocab = nn.Embedding(vocab, e), nn.Dropout(0.5), vocab
        self.enc, self.dec = nn.Linear(e, h), nn.Linear(e, h)
        self.mix = nn.Linear(h, h)
        self.h2m, self.h2v, self.z2h, self.out = nn.Linear(h, z), nn.Linear(h, z), nn.Linear(z, h), nn.Linear(h, vocab)

    def forward(self, x, length):
        batch = x.size(0)
        sorted_lengths, idx = torch.sort(length, descending=True)
        x = x[idx]
        emb = self.embedding(x)
        packed = rnn_utils.pack_padded_sequence(emb, sorted_lengths.data.tolist(), batch_first=True)
        enc = torch.tanh(self.enc(packed.data))
        padded = rnn_utils.pad_packed_sequence(rnn_utils.PackedSequence(enc, packed.batch_sizes), batch_first=True)[0]
        hidden = self.mix(padded.max(1).values)
        mean, logv = self.h2m(hidden), self.h2v(hidden)
        z = to(torch.randn([batch, mean.size(1)])) * torch.exp(0.5 * logv) + mean
        hidden = self.z2h(z)
        prob = torch.rand(x.size())
        if torch.cuda.is_available():
            prob = prob.cuda()
        prob[(x.data - 1) * (x.data - 0) == 0] = 1
        y = x.clone()
        y[prob < 0.2] = 3
        demb = self.embedding_dropout(self.embedding(y))
        packed = rnn_utils.pack_padded_sequence(demb, sorted_lengths.data.tolist(), batch_first=True)
        out, batch_sizes = self.dec(packed.data), packed.batch_sizes
        padded = (
            rnn_utils.pad_packed_sequence(rnn_utils.PackedSequence(out, batch_sizes), batch_first=True)[0].contiguous()
            + hidden[:, None]
        )
        _, rev = torch.sort(idx)
        padded = padded[rev]
        b, s, _ = padded.size()
        logp = nn.functional.log_softmax(self.out(padded.view(-1, padded.size(2))), dim=-1)
        return logp.view(b, s, self.vocab), mean, logv, z


model = to(SentenceVAE())
NLL = nn.NLLLoss(ignore_index=0, reduction="sum")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
step = 0
sets = {"train": Sentences(128), "valid": Sentences(64)}
for epoch in range(1):
    for split in ("train", "valid"):
        loader = DataLoader(sets[split], batch_size=32, shuffle=split == "train", pin_memory=torch.cuda.is_available())
        tracker = defaultdict(lambda: torch.tensor([]))
        model.train() if split == "train" else model.eval()
        for iteration, batch in enumerate(loader):
            n = batch["input"].size(0)
            for k, v in batch.items():
                if torch.is_tensor(v):
                    batch[k] = to(v)
            logp, mean, logv, z = model(batch["input"], batch["length"])
            target = batch["target"][:, : torch.max(batch["length"]).item()].contiguous().view(-1)
            nll = NLL(logp.view(-1, logp.size(2)), target)
            kl = -0.5 * torch.sum(1 + logv - mean.pow(2) - logv.exp())
            loss = (nll + 0.1 * kl) / n
            if split == "train":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
            tracker["ELBO"] = torch.cat((tracker["ELBO"], loss.data.cpu().view(1, -1)), dim=0)
        print(split, tracker["ELBO"].mean().item())
    path = os.path.join(tempfile.mkdtemp(), "E%i.pytorch" % epoch)
    torch.save(model.state_dict(), path)
model.load_state_dict(torch.load(path))
