"""Causal LM: documents packed into blocks with positions that begin anew, prompt tokens ignored (-100), accumulation with a
smaller last group, gradient checkpointing, bf16 autocast, gradient norms by layer."""

import json
import os
import tempfile
from collections import defaultdict

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
device, block, accum = "cuda", 512, 4

path = os.path.join(tempfile.mkdtemp(), "config.json")
with open(path, "w") as f:
    json.dump(
        {
            "model_type": "gpt2",
            "vocab_size": 12000,
            "n_positions": 512,
            "n_embd": 512,
            "n_layer": 6,
            "n_head": 8,
            "architectures": ["GPT2LMHeadModel"],
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        f,
    )


class Packed(IterableDataset):
    def __init__(self, docs, block):
        self.docs, self.block = docs, block

    def __iter__(self):
        g = torch.Generator().manual_seed(7)
        ids, labels, pos = [], [], []
        for _ in range(self.docs):
            n = int(torch.randint(40, 300, (1,), generator=g))
            prompt = n // 4
            doc = torch.randint(1, 12000, (n,), generator=g).tolist() + [0]
            ids += doc
            labels += [-100] * prompt + doc[prompt:]
            pos += list(range(len(doc)))
            while len(ids) >= self.block:
                yield {
                    "input_ids": torch.tensor(ids[: self.block]),
                    "labels": torch.tensor(labels[: self.block]),
                    "position_ids": torch.tensor(pos[: self.block]),
                }
                ids, labels, pos = ids[self.block :], labels[self.block :], pos[self.block :]


def grad_norms(model):
    norms = defaultdict(float)
    for name, p in model.named_parameters():
        if p.grad is not None:
            layer = name.split(".h.")[1].split(".")[0] if ".h." in name else "other"
            norms[layer] += p.grad.detach().float().norm(2).item() ** 2
    return {k: v**0.5 for k, v in norms.items()}


def main():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(os.path.dirname(path)))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    loader = DataLoader(Packed(140, block), batch_size=4)
    batches = list(loader)
    print(len(batches), "batches, the last of", len(batches[-1]["input_ids"]))
    model.train()
    tokens = 0
    for start in range(0, len(batches), accum):
        group = batches[start : start + accum]
        valid = sum((b["labels"][:, 1:] != -100).sum() for b in group)
        total = 0.0
        for b in group:
            b = {k: v.to(device) for k, v in b.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(input_ids=b["input_ids"], position_ids=b["position_ids"]).logits
                loss = (
                    torch.nn.functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1).float(), b["labels"][:, 1:].flatten(), reduction="sum"
                    )
                    / valid
                )
            loss.backward()
            total += loss.item()
        norms = grad_norms(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sched.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int(valid)
        print(
            f"step {start // accum} loss {total:.3f} tokens {tokens} norm {max(norms.values()):.2f} lr {sched.get_last_lr()[0]:.2e}"
        )


if __name__ == "__main__":
    main()
