"""torch-optimi: a bf16 model with Kahan sums, gradients released during the backward pass, then plain with accumulation."""

import torch
import torch.nn.functional as F
from optimi import AdamW, StableAdamW, param_groups_weight_decay, prepare_for_gradient_release, remove_gradient_release
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 8 * width // 3 * 2, bias=False),
            nn.Linear(8 * width // 3, width, bias=False),
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 8, c // 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def build():
    return nn.Sequential(
        nn.Embedding(4000, 384), *[Block(384) for _ in range(4)], nn.RMSNorm(384), nn.Linear(384, 4000, bias=False)
    ).to("cuda", torch.bfloat16)


model = build()
optimizer = StableAdamW(param_groups_weight_decay(model, 0.1), lr=1e-3, decouple_lr=True, gradient_release=True)
prepare_for_gradient_release(model, optimizer)
scheduler = CosineAnnealingLR(optimizer, 10)
for step in range(10):
    ids = torch.randint(0, 4000, (8, 257), device="cuda")
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
print(loss.item(), torch.cuda.max_memory_allocated())
remove_gradient_release(model)
optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, triton=False)
for step in range(12):
    ids = torch.randint(0, 4000, (8, 257), device="cuda")
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    (loss / 3).backward()
    if step % 3 == 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print(loss.item(), torch.cuda.max_memory_allocated())
