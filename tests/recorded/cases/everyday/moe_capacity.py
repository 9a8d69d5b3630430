"""A mixture of experts with top-2 routing and a capacity, dispatched by one_hot and einsum; auxiliary loss; resumes from its checkpoint."""

import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Top2Gate(nn.Module):
    def __init__(self, d, experts, capacity_factor=1.25):
        super().__init__()
        self.wg, self.experts, self.factor = nn.Linear(d, experts, bias=False), experts, capacity_factor

    def forward(self, x):
        s, e = x.size(0), self.experts
        capacity = int(2 * self.factor * s / e)
        gates = F.softmax(self.wg(x).float(), dim=1)
        i1 = gates.argmax(1)
        m1 = F.one_hot(i1, num_classes=e)
        noisy = (gates + torch.empty_like(gates).exponential_().log().neg()).masked_fill(m1.bool(), float("-inf"))
        m2 = F.one_hot(noisy.argmax(1), num_classes=e)
        l1 = torch.cumsum(m1, dim=0) - 1
        l2 = torch.cumsum(m2, dim=0) - 1 + m1.sum(0, keepdim=True)
        aux = torch.mean(gates.mean(0) * m1.float().mean(0)) * e * e
        m1, m2 = m1 * torch.lt(l1, capacity), m2 * torch.lt(l2, capacity)
        p1, p2 = (l1 * m1).sum(1), (l2 * m2).sum(1)
        g1, g2 = (gates * m1).sum(1), (gates * m2).sum(1)
        denom = (g1 + g2).clamp(min=torch.finfo(torch.float32).eps)
        combine = sum(
            torch.einsum("se,sc->sec", (g / denom)[:, None] * m, F.one_hot(p, capacity).float())
            for g, m, p in ((g1, m1, p1), (g2, m2, p2))
        )
        return aux, combine, combine.bool()


class MoE(nn.Module):
    def __init__(self, d, h, experts):
        super().__init__()
        self.gate = Top2Gate(d, experts)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(experts, d, h) * d**-0.5),
            nn.Parameter(torch.randn(experts, h, d) * h**-0.5),
        )

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        aux, combine, dispatch = self.gate(flat)
        inp = torch.einsum("sec,sm->ecm", dispatch.to(flat.dtype), flat)
        out = torch.bmm(F.gelu(torch.bmm(inp, self.w1)), self.w2)
        return torch.einsum("sec,ecm->sm", combine.to(out.dtype), out).view_as(x), aux


class Layer(nn.Module):
    def __init__(self, d, heads, experts):
        super().__init__()
        self.attn, self.moe = nn.MultiheadAttention(d, heads, batch_first=True), MoE(d, 4 * d, experts)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        y = self.n1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        y, aux = self.moe(self.n2(x))
        return x + y, aux


class LM(nn.Module):
    def __init__(self, vocab=8000, d=256, layers=3, experts=8):
        super().__init__()
        self.emb, self.layers, self.head = (
            nn.Embedding(vocab, d),
            nn.ModuleList(Layer(d, 4, experts) for _ in range(layers)),
            nn.Linear(d, vocab),
        )

    def forward(self, ids):
        x, total = self.emb(ids), 0.0
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        for layer in self.layers:
            x, aux = layer(x, mask)
            total = total + aux
        return self.head(x), total


def build(device):
    model = LM().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))


def train(model, opt, sched, loader, start, stop, device):
    step = start
    for (ids,) in loader:
        if step >= stop:
            break
        ids = ids.to(device)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            logits, aux = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * aux
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        print(step, loss.item(), aux.item())
    return step


torch.manual_seed(5)
device = torch.device("cuda", torch.cuda.current_device())
data = TensorDataset(torch.randint(0, 8000, (64, 129)))
path = os.path.join(tempfile.mkdtemp(), "ckpt.pt")
model, opt, sched = build(device)
step = train(model, opt, sched, DataLoader(data, 8, sampler=RandomSampler(data)), 0, 4, device)
torch.save(
    {
        "model": model.state_dict(),
        "opt": opt.state_dict(),
        "sched": sched.state_dict(),
        "step": step,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(),
    },
    path,
)
del model, opt, sched
model, opt, sched = build(device)
ckpt = torch.load(path, map_location="cpu", weights_only=False)
model.load_state_dict(ckpt["model"])
opt.load_state_dict(ckpt["opt"])
sched.load_state_dict(ckpt["sched"])
torch.set_rng_state(ckpt["rng"]), torch.cuda.set_rng_state(ckpt["cuda_rng"])
step = train(model, opt, sched, DataLoader(data, 8, sampler=RandomSampler(data)), ckpt["step"], 8, device)
model.eval()
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    nll = [
        F.cross_entropy(model(ids[:, :-1].to(device))[0].flatten(0, 1).float(), ids[:, 1:].flatten().to(device)).item()
        for (ids,) in DataLoader(data, 16)
    ]
print("ppl", torch.tensor(nll).mean().exp().item())
