"""The Trainer with padding to the longest of a batch, gradients accumulated, evaluation at the end."""

import random
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments


class Reviews(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.rows = []
        for _ in range(count):
            length = min(384, int(draw.lognormvariate(4.0, 0.8)) + 4)
            self.rows.append(
                {"input_ids": [draw.randrange(5, 6000) for _ in range(length)], "labels": draw.randrange(3)}
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    longest = (longest + 7) // 8 * 8
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for n, row in enumerate(rows):
        ids[n, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def main():
    config = DistilBertConfig(vocab_size=6000, dim=256, n_layers=4, n_heads=4, hidden_dim=1024, num_labels=3)
    model = DistilBertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=16,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=5,
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=Reviews(160, 1), eval_dataset=Reviews(64, 2), data_collator=collate
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
