"""Trainer with AdamW of 8 bits of torchao, which calls torch.compile(...)."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(0, 2000, (64,), generator=g)
        return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=2000, n_positions=128, n_embd=256, n_layer=4, n_head=4, attn_implementation="eager")
)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    max_steps=4,
    optim="adamw_torch_8bit",
    report_to=[],
    save_strategy="no",
    logging_steps=2,
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Rows()).train()
