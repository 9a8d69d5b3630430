"""Decoding loops of a program's own: what is written from some tokens is what following every token gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphmem.answering import runs
from graphmem.answering.question import Question
from graphmem.capture.program import asking, decoding
from graphmem.trace import Trace
from graphmem.training.program import Program
from tests.support.captures import rows
from tests.support.examples import but_slow, first_quick

pytest.importorskip("torch")

PRELUDE = """
import torch, math
from torch import nn
from torch.nn import functional as F
VOCAB, WIDTH, HEADS = 50, 32, 2

class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused, self.qkv, self.o = fused, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache = torch.zeros(2, 2, 400, HEADS, WIDTH // HEADS).cuda()

    def forward(self, x, past=None, start=None):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1) for t in self.qkv(x).split(WIDTH, 2))
        if start is not None:
            self.cache[0, :B, start : start + T], self.cache[1, :B, start : start + T] = k, v
            k, v = (cache[:B, : start + T].repeat_interleave(1, 2) for cache in self.cache)
        elif past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        q, kt, vt = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.fused:
            y = F.scaled_dot_product_attention(q, kt, vt, is_causal=past is None)
        else:
            scores = q @ kt.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
            if T > 1 and start is None:
                scores = scores.masked_fill(torch.tril(torch.ones(T, T, device=x.device)) == 0, -math.inf)
            y = F.softmax(scores, -1) @ vt
        return x + self.o(y.transpose(1, 2).reshape(B, T, WIDTH)), (k, v)

class Model(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(VOCAB, WIDTH), Attention(fused)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, past=None, start=None):
        y, past = self.attention(self.embedding(ids), past, start)
        return self.head(y), past

torch.set_grad_enabled(False)
prompt = torch.randint(0, VOCAB, (2, 7), device="cuda")
"""

#: What a program does -> the source. The lengths go from 7 beyond 64, the end of a block of tokens (decoding.BLOCK),
#: and are no longer: the slow half of a test is the one that follows every token.
PROBED = {
    "ids that grow, and a window": """
def generate(model, idx, tokens, window=66):
    for _ in range(tokens):
        seen = idx if idx.size(1) <= window else idx[:, -window:]
        logits, _ = model(seen)
        logits = logits[:, -1, :]
        values, _ = torch.topk(logits, 5)
        logits[logits < values[:, [-1]]] = -math.inf
        idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
    return idx
out = generate(Model().cuda().bfloat16(), prompt, 80)
F.one_hot(out, VOCAB)
""",
    "scores with the square of the length": """
model, idx = Model(fused=False).cuda(), prompt
for _ in range(70):
    logits, _ = model(idx)
    idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), 1)
F.one_hot(idx, VOCAB)
""",
    "keys and values, and tokens in lists": """
def generate(model, ids, tokens):
    past, new, numbers, texts = [], [], [], [[], []]
    for i in range(tokens):
        logits, *past = model(ids, *past)  # a list that is another one every time
        ids = logits[:, -1].argmax(-1, keepdim=True)
        new.append(ids)
        numbers.append(ids[0].item())
        for text, one in zip(texts, ids): text.append(int(one))
    return torch.cat([prompt] + new, 1), numbers, texts
out, numbers, texts = generate(Model().cuda().bfloat16(), prompt, 70)
assert out.shape == (2, 77) and len(numbers) == len(texts[0]) == len(texts[1]) == 70
ids = torch.tensor(numbers).cuda()
del out
F.one_hot(ids, VOCAB)
""",
    "a cache that the loop's numbers fill": """
model = Model(fused=False).cuda()
tokens = torch.zeros(2, 80, dtype=torch.long, device="cuda")
before = 0
for at in range(7, 80):
    logits, _ = model(tokens[:, before:at], start=before)
    tokens[:, at] = logits[:, -1].argmax(-1)
    before = at
F.one_hot(tokens, VOCAB)
""",
    "a list of ids that is the input": """
model, ids = Model().cuda().bfloat16(), [1, 2, 3]
for _ in range(70):
    logits, _ = model(torch.tensor([ids], device="cuda"))
    ids.append(int(logits[0, -1].argmax()))
assert len(ids) == 73
""",
    "steps that collect what they make": """
net, x, seen = nn.Conv2d(3, 3, 3, padding=1).cuda(), torch.zeros(2, 3, 8, 8).cuda(), []
for step in reversed(range(100)):
    pass
for step in range(100):
    x = x - 0.1 * net(x)
    seen.append(x)
assert torch.stack(seen).shape == (100, 2, 3, 8, 8)
""",
}

FOLLOWED = {
    "a count of its own": """
model, x, at = Model(fused=False).cuda(), prompt[:, :1], 0
for _ in range(60):
    logits, _ = model(x, start=at)
    x, at = logits[:, -1].argmax(-1, keepdim=True), at + 1
assert at == 60
""",
    "something every so often": """
model, idx = Model().cuda(), prompt
for step in range(60):
    logits, _ = model(idx)
    idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), 1)
    if step % 25 == 0: F.one_hot(idx, 100 * VOCAB)
""",
    "its last tokens in an object": """
class Sampler: pass
sampler, model, idx = Sampler(), Model().cuda(), prompt
sampler.seen = []
for step in range(60):
    logits, _ = model(idx)
    idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), 1)
    sampler.seen.append(logits[:, -1].max())
assert len(sampler.seen) == 60
""",
    "it is left in the middle": """
model, idx = Model().cuda(), prompt
for step in range(80):
    logits, _ = model(idx)
    idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), 1)
    if idx.shape[1] > 60: break
assert idx.shape[1] == 61
""",
}


def traced(path: Path, source: str) -> Trace:
    path.write_text(PRELUDE + source, encoding="utf-8")
    question = Question(Program(str(path)), device="H200-141GB")
    made: Any = runs.record(question, runs.load(question))
    assert not made.ending.failed, made.ending.words()
    return made.trace


_LONG = {
    "scores with the square of the length", "a list of ids that is the input", "steps that collect what they make",
}  # fmt: skip


@pytest.mark.parametrize("name", [*but_slow(PROBED, _LONG), *first_quick([*FOLLOWED], 1)])
def test_some_tokens_tell_of_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, written = (PROBED | FOLLOWED)[name], []
    write = decoding.Decoding._write

    def noted(self: decoding.Decoding) -> None:
        write(self)
        written.append(len(self._tokens))

    monkeypatch.setattr(decoding.Decoding, "_write", noted)
    probed = traced(tmp_path / "generate.py", source)
    assert bool(written) == (name in PROBED)
    assert all(followed < 35 for followed in written)
    monkeypatch.setattr(asking, "FEWEST", 10**9)
    assert rows(probed) == rows(traced(tmp_path / "generate.py", source))
