"""transformers.Trainer with save_total_limit=2 in a folder that holds three checkpoints."""
import os

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=1000)
rows = [{"input_ids": torch.arange(16), "attention_mask": torch.ones(16, dtype=torch.long), "labels": i % 2} for i in range(24)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=3, save_steps=1, save_total_limit=2, report_to="none", disable_tqdm=True
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
trainer.train()
trainer.save_model("final")
print("SEE", sorted(os.listdir("out")), sorted(os.listdir("final")))
newest = sorted(os.listdir("out"))[-1]
print("SEE", {n: os.path.getsize(f"out/{newest}/{n}") for n in ("model.safetensors", "optimizer.pt")})
