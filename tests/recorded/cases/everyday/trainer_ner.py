"""Trainer: compute_metrics, early stopping, best model at the end, group by length, a callback, predict afterwards."""

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Reviews(Dataset):
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.rows = [
            {"input_ids": r.integers(4, 5000, int(r.integers(8, 120))).tolist(), "label": int(r.integers(0, 4))}
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(features):
    width = max(len(f["input_ids"]) for f in features)
    return {
        "input_ids": torch.tensor([f["input_ids"] + [1] * (width - len(f["input_ids"])) for f in features]),
        "attention_mask": torch.tensor(
            [[1] * len(f["input_ids"]) + [0] * (width - len(f["input_ids"])) for f in features]
        ),
        "labels": torch.tensor([f["label"] for f in features]),
    }


def compute_metrics(p):
    preds = np.argmax(p.predictions, axis=1)
    return {
        "accuracy": float((preds == p.label_ids).mean()),
        "f1": float(np.mean([(preds[p.label_ids == c] == c).mean() for c in range(4)])),
    }


class Memory(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print(state.global_step, torch.cuda.max_memory_allocated() // 2**20, "MiB")


model = RobertaForSequenceClassification(
    RobertaConfig(
        vocab_size=5000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=4,
        max_position_embeddings=130,
        pad_token_id=1,
    )
)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    num_train_epochs=2,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    eval_strategy="epoch",
    save_strategy="epoch",
    learning_rate=5e-5,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    logging_steps=2,
    bf16=True,
    report_to=[],
    seed=1,
    warmup_steps=2,
    label_smoothing_factor=0.1,
    save_total_limit=1,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Reviews(96, 0),
    eval_dataset=Reviews(60, 1),
    data_collator=collate,
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(3), Memory()],
)
trainer.train()
print(trainer.evaluate())
print(trainer.predict(Reviews(40, 2)).predictions.shape)
trainer.save_model()
