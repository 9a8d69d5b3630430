"""LoRA by hand on a frozen GPT-2: gradient checkpointing, padded batches, then generate, then merge."""

import argparse
import math
import random

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from transformers.pytorch_utils import Conv1D


class LoRAConv1D(nn.Module):
    def __init__(self, base, r, alpha, dropout):
        super().__init__()
        self.base, self.scale = base, alpha / r
        nx, nf = base.weight.shape
        self.A, self.B = nn.Parameter(torch.empty(r, nx)), nn.Parameter(torch.zeros(nf, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.scale * (self.dropout(x) @ self.A.T @ self.B.T)

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.scale * (self.B @ self.A).T
        return self.base


def inject(module, r, alpha, dropout):
    for name, child in list(module.named_children()):
        if isinstance(child, Conv1D) and name in ("c_attn",):
            setattr(module, name, LoRAConv1D(child, r, alpha, dropout))
        else:
            inject(child, r, alpha, dropout)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--r", type=int, default=8)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--bs", type=int, default=6)
    p.add_argument("--grad-accum", type=int, default=2)
    args = p.parse_args()
    set_seed(11)
    texts = [[random.randrange(50, 9000) for _ in range(random.randint(10, 180))] for _ in range(args.bs * 6)]

    def collate(rows):
        width = max(map(len, rows))
        width = (width + 7) // 8 * 8
        ids = torch.full((len(rows), width), 0)
        attn = torch.zeros((len(rows), width), dtype=torch.long)
        for i, r in enumerate(rows):
            ids[i, -len(r) :] = torch.tensor(r)
            attn[i, -len(r) :] = 1
        labels = ids.masked_fill(attn == 0, -100)
        return dict(input_ids=ids, attention_mask=attn, labels=labels)

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=10000, bos_token_id=None, eos_token_id=None, n_embd=384, n_layer=6, n_head=6)
    )
    model.requires_grad_(False)
    inject(model.transformer, args.r, 16, 0.05)
    model.cuda()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    trainable = [q for q in model.parameters() if q.requires_grad]
    print(f"trainable {sum(q.numel() for q in trainable):,} of {sum(q.numel() for q in model.parameters()):,}")
    opt = torch.optim.AdamW(trainable, lr=args.lr)
    loader = DataLoader(
        texts, batch_size=args.bs, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(3)
    )
    model.train()
    tokens = 0
    for i, batch in enumerate(loader):
        batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss / args.grad_accum
        loss.backward()
        tokens += (batch["labels"] != -100).sum().item()
        if (i + 1) % args.grad_accum == 0:
            nn.utils.clip_grad_norm_(trainable, 1.0)
            opt.step()
            opt.zero_grad()
            print(f"{i} loss {loss.item():.3f} tokens {tokens}")
    model.eval()
    model.gradient_checkpointing_disable()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        out = model.generate(
            batch["input_ids"][:2],
            attention_mask=batch["attention_mask"][:2],
            max_new_tokens=16,
            do_sample=True,
            top_k=50,
            pad_token_id=0,
        )
    print(out.shape)
    for block in model.transformer.h:
        block.attn.c_attn = block.attn.c_attn.merge()


if __name__ == "__main__":
    main()
