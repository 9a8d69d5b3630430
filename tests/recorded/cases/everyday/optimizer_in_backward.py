"""An optimizer a parameter, stepped in the backward pass: no gradient outlives its step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

model = nn.Sequential(
    nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 1000)
)

optimizers = {p: torch.optim.Adam([p], lr=1e-3, foreach=False) for p in model.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)

model.to(device)

for step in range(6):
    x = torch.randn(256, 1024, device=device)
    y = torch.randint(0, 1000, (256,), device=device)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

print(f"{torch.cuda.max_memory_allocated() / 2**20:.1f} MiB at most")
