"""transformers.Trainer that resumes from the newest checkpoint of its folder."""
import os

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=1000)
rows = [{"input_ids": torch.arange(16), "attention_mask": torch.ones(16, dtype=torch.long), "labels": i % 2} for i in range(24)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=5, save_steps=1, save_total_limit=3, report_to="none", disable_tqdm=True
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint=True)
print("SEE", trainer.state.global_step, sorted(os.listdir("out")))
