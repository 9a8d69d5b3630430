"""Trainer with two checkpoints kept, resumed from the last one, and the best one loaded at the end."""

import os
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 1000, (32,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones(32, dtype=torch.long), "labels": index % 2}


def trainer(folder, epochs):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, report_to=[], logging_steps=2,
        dataloader_num_workers=0, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(BertForSequenceClassification(config), arguments, train_dataset=Rows(), eval_dataset=Rows())


with tempfile.TemporaryDirectory() as folder:
    trainer(folder, 3).train()
    assert sorted(os.listdir(folder)) == ["checkpoint-12", "checkpoint-8"], os.listdir(folder)
    files = sorted(os.listdir(os.path.join(folder, "checkpoint-12")))
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"} <= set(files)
    resumed = trainer(folder, 4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 16
    print(sorted(os.listdir(folder)), torch.cuda.max_memory_allocated())
