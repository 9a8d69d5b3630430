"""Two towers in CLIP's manner: a picture encoder of patches, a text transformer with an EOT token, fp16, recall at k."""

import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n, context=32, vocab=4000):
        self.n, self.context, self.vocab = n, context, vocab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        r = random.Random(i)
        text = np.zeros(self.context, dtype=np.int64)
        k = r.randint(4, self.context - 2)
        text[:k] = [r.randrange(1, self.vocab - 1) for _ in range(k)]
        text[k] = self.vocab - 1
        image = np.asarray(
            [[[(i * 7 + x + y) % 255 for _ in range(3)] for x in range(0, 64, 1)] for y in range(1)], dtype=np.uint8
        ).repeat(64, 0)
        return torch.from_numpy(image).permute(2, 0, 1).float().div(255), torch.from_numpy(text)


class Block(nn.Module):
    def __init__(self, d, heads, mask=None):
        super().__init__()
        self.attn, self.ln_1, self.ln_2 = nn.MultiheadAttention(d, heads), nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.mask = mask

    def forward(self, x):
        mask = self.mask.to(dtype=x.dtype, device=x.device) if self.mask is not None else None
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class CLIP(nn.Module):
    def __init__(self, d=256, layers=4, vocab=4000, context=32, size=64, patch=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, d, patch, patch, bias=False)
        n = (size // patch) ** 2
        self.cls, self.pos = nn.Parameter(torch.randn(d) / d**0.5), nn.Parameter(torch.randn(n + 1, d) / d**0.5)
        self.visual = nn.Sequential(*[Block(d, 4) for _ in range(layers)])
        causal = torch.empty(context, context).fill_(float("-inf")).triu_(1)
        self.text = nn.Sequential(*[Block(d, 4, causal) for _ in range(layers)])
        self.tok, self.tpos = nn.Embedding(vocab, d), nn.Parameter(torch.empty(context, d))
        self.ln_v, self.ln_t = nn.LayerNorm(d), nn.LayerNorm(d)
        self.vproj, self.tproj = nn.Parameter(d**-0.5 * torch.randn(d, 128)), nn.Parameter(torch.empty(d, 128))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        (
            nn.init.normal_(self.tok.weight, std=0.02),
            nn.init.normal_(self.tpos, std=0.01),
            nn.init.normal_(self.tproj, std=d**-0.5),
        )

    def encode_image(self, x):
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        x = torch.cat(
            [self.cls.to(x.dtype) + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device), x], 1
        ) + self.pos.to(x.dtype)
        x = self.visual(x.permute(1, 0, 2)).permute(1, 0, 2)
        return self.ln_v(x[:, 0]) @ self.vproj

    def encode_text(self, t):
        x = (self.tok(t) + self.tpos).permute(1, 0, 2)
        x = self.ln_t(self.text(x).permute(1, 0, 2))
        return x[torch.arange(x.shape[0]), t.argmax(dim=-1)] @ self.tproj

    def forward(self, image, text):
        i, t = F.normalize(self.encode_image(image), dim=1), F.normalize(self.encode_text(text), dim=1)
        return self.logit_scale.exp() * i @ t.t()


def main():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = CLIP().to(device)
    exclude = lambda n, p: p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n
    named = list(model.named_parameters())
    opt = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
            {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": 0.2},
        ],
        lr=5e-4,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    scaler = torch.amp.GradScaler("cuda")
    train = DataLoader(Pairs(224), batch_size=64, shuffle=True, num_workers=2, drop_last=True, persistent_workers=True)
    for epoch in range(2):
        for image, text in train:
            image, text = image.to(device, non_blocking=True), text.to(device, non_blocking=True)
            opt.zero_grad()
            with torch.autocast("cuda"):
                logits = model(image, text)
                labels = torch.arange(len(image), device=device)
                loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
        print(epoch, loss.item(), model.logit_scale.exp().item())
    model.eval()
    images, texts = [], []
    with torch.inference_mode(), torch.autocast("cuda"):
        for image, text in DataLoader(Pairs(100), batch_size=40):
            images.append(F.normalize(model.encode_image(image.to(device)), dim=-1).cpu())
            texts.append(F.normalize(model.encode_text(text.to(device)), dim=-1).cpu())
        sim = torch.cat(images).to(device) @ torch.cat(texts).to(device).t()
        ranking = torch.argsort(sim, descending=True)
        preds = torch.where(ranking == torch.arange(len(sim), device=device).view(-1, 1))[1].cpu().numpy()
    print({f"R@{k}": float(np.mean(preds < k)) for k in (1, 5, 10)})


if __name__ == "__main__":
    main()
