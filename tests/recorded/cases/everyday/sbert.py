"""Sentence embeddings: mean pooling, in-batch negatives, hard negatives, then the corpus is embedded and written to numpy."""

import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoModel, BertConfig

rng = np.random.RandomState(0)
torch.manual_seed(0)
device = torch.device("cuda")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = AutoModel.from_config(
            BertConfig(
                vocab_size=9000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
            )
        )
        self.head = nn.Linear(256, 128, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).expand(hidden.size()).float()
        pooled = torch.sum(hidden * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
        return F.normalize(self.head(pooled), p=2, dim=1)


def sentence():
    return rng.randint(5, 9000, rng.randint(4, 60))


def pad(sentences):
    width = max(len(s) for s in sentences)
    ids = np.zeros((len(sentences), width), dtype=np.int64)
    for i, s in enumerate(sentences):
        ids[i, : len(s)] = s
    ids = torch.from_numpy(ids)
    return {"input_ids": ids, "attention_mask": (ids > 0).int()}


triples = [(sentence(), sentence(), sentence()) for _ in range(256)]
model = Encoder().to(device)
opt = torch.optim.AdamW(
    [{"params": model.bert.parameters(), "lr": 2e-5}, {"params": model.head.parameters(), "lr": 1e-3}]
)
scaler = torch.amp.GradScaler("cuda")
batch_size, scale = 48, 20.0
order = rng.permutation(len(triples))
for start in range(0, 144, batch_size):
    rows = [triples[i] for i in order[start : start + batch_size]]
    a, p, n = ({k: v.to(device) for k, v in pad([r[j] for r in rows]).items()} for j in range(3))
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        ea, candidates = model(**a), torch.cat([model(**p), model(**n)])
        scores = ea @ candidates.T * scale
        loss = F.cross_entropy(scores, torch.arange(len(rows), device=device))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    acc = (scores.argmax(1) == torch.arange(len(rows), device=device)).float().mean()
    print(f"loss {loss.item():.4f} acc {acc.item():.2f} scale {scaler.get_scale()}")

model.eval()
corpus = sorted((sentence() for _ in range(300)), key=len, reverse=True)
chunks = []
with torch.no_grad():
    for start in range(0, len(corpus), 64):
        batch = {k: v.to(device) for k, v in pad(corpus[start : start + 64]).items()}
        chunks.append(model(**batch).cpu().numpy())
emb = np.vstack(chunks)
path = os.path.join(tempfile.mkdtemp(), "corpus.npy")
np.save(path, emb)
loaded = torch.from_numpy(np.load(path)).to(device)
queries = loaded[:10]
top = torch.topk(queries @ loaded.T, k=5, dim=1)
print(emb.shape, top.indices.shape)
