"""Fine-tuning BERT by hand: dynamic padding, attention masks, warm-up, evaluation with numpy."""

import random

import numpy as np
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, random_split
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

seed_val = 42
random.seed(seed_val)
np.random.seed(seed_val)
torch.manual_seed(seed_val)
torch.cuda.manual_seed_all(seed_val)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Texts(Dataset):
    def __init__(self, n):
        self.rows = [
            (
                [101] + [random.randrange(1000, 5000) for _ in range(random.randint(5, 120))] + [102],
                random.randint(0, 1),
            )
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, label = self.rows[i]
        return {"input_ids": ids, "label": label}


def collate(batch):
    longest = max(len(b["input_ids"]) for b in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for r, b in enumerate(batch):
        n = len(b["input_ids"])
        ids[r, :n] = torch.tensor(b["input_ids"])
        mask[r, :n] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([b["label"] for b in batch])}


def flat_accuracy(preds, labels):
    return np.sum(np.argmax(preds, axis=1).flatten() == labels.flatten()) / len(labels)


dataset = Texts(80)
train_set, val_set = random_split(dataset, [64, 16])
train_loader = DataLoader(train_set, sampler=RandomSampler(train_set), batch_size=16, collate_fn=collate)
val_loader = DataLoader(val_set, sampler=SequentialSampler(val_set), batch_size=16, collate_fn=collate)
config = BertConfig(
    vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, num_labels=2
)
model = BertForSequenceClassification(config)
model.to(device)
optimizer = AdamW(model.parameters(), lr=2e-5, eps=1e-8)
epochs = 1
scheduler = get_linear_schedule_with_warmup(
    optimizer, num_warmup_steps=0, num_training_steps=len(train_loader) * epochs
)
for epoch in range(epochs):
    total = 0
    model.train()
    for step, batch in enumerate(train_loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        model.zero_grad()
        out = model(**batch)
        total += out.loss.item()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    print("Average training loss:", total / len(train_loader))
    model.eval()
    accuracy = 0
    for batch in val_loader:
        batch = tuple(batch[k].to(device) for k in ("input_ids", "attention_mask", "labels"))
        with torch.no_grad():
            out = model(batch[0], token_type_ids=None, attention_mask=batch[1], labels=batch[2])
        logits = out.logits.detach().cpu().numpy()
        accuracy += flat_accuracy(logits, batch[2].to("cpu").numpy())
    print("Accuracy", accuracy / len(val_loader))
