"""Accelerate: a warm-up on short sequences, then the main phase on long ones, with the same optimizer."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup


class Masked(Dataset):
    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(5, 3000, (self.length,), generator=g)
        labels = torch.where(torch.rand(self.length, generator=g) < 0.15, ids, torch.tensor(-100))
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def train(accelerator, model, optimizer, scheduler, loader, name):
    model.train()
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 2 == 0:
            accelerator.print(name, step, loss.item())


def main():
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = BertConfig(
        vocab_size=3000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    short = DataLoader(Masked(128, 64), batch_size=16, shuffle=True)
    long = DataLoader(Masked(64, 384), batch_size=8, shuffle=True)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 8)
    model, optimizer, short, long, scheduler = accelerator.prepare(model, optimizer, short, long, scheduler)
    train(accelerator, model, optimizer, scheduler, short, "short")
    train(accelerator, model, optimizer, scheduler, long, "long")
    accelerator.wait_for_everyone()
    accelerator.print(f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
