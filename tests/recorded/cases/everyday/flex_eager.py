"""Flex attention without torch.compile(): sliding windows with a bias."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch.manual_seed(0)
B, H, S, D = 2, 4, 512, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(H * D), nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
        a = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) * 0.1, block_mask=mask)
        return x + self.out(a.transpose(1, 2).reshape(B, S, H * D))


mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 128), None, None, S, S, device="cuda")
net = nn.ModuleList(Block() for _ in range(2)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for _ in range(3):
    x = torch.randn(B, S, H * D, device="cuda")
    for block in net:
        x = block(x, mask)
    loss = x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
