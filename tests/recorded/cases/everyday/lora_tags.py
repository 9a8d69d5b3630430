"""Low-rank adapters without a library: parameters are tagged where they are made, and sorted by tag on the card."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out, rank=8, alpha=16):
        super().__init__(n_in, n_out)
        self.lora_a = nn.Parameter(torch.empty(rank, n_in))
        self.lora_b = nn.Parameter(torch.zeros(n_out, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale = alpha / rank
        for p in (self.lora_a, self.lora_b):
            p.is_lora = True

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = LoRALinear(width, 4 * width)
        self.down = LoRALinear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, vocabulary=8000, width=512, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight.no_decay = True

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def main():
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16).cuda()
    trained, frozen = [], []
    for p in model.parameters():
        (trained if getattr(p, "is_lora", False) else frozen).append(p)
    for p in frozen:
        p.requires_grad = False
    for p in trained:
        p.data = p.data.float()  # adapters in full precision
    print(len(trained), "trained", len(frozen), "frozen", getattr(model.head.weight, "no_decay", False))
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for step in range(4):
        ids = torch.randint(0, 8000, (8, 128), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids)
            loss = F.cross_entropy(logits.view(-1, 8000), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("done")


if __name__ == "__main__":
    main()
