"""Named entities with BERT: padding collator, warmup, clipping, entity F1 on the host, the best epoch is kept."""

import argparse
import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import BertConfig, BertForTokenClassification, get_linear_schedule_with_warmup, set_seed

logger = logging.getLogger(__name__)
LABELS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=3e-5)
    p.add_argument("--train_batch_size", type=int, default=16)
    p.add_argument("--eval_batch_size", type=int, default=32)
    p.add_argument("--max_grad_norm", type=float, default=1.0)
    p.add_argument("--weight_decay", type=float, default=0.01)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--output_dir", default=tempfile.mkdtemp())
    return p.parse_args()


class NerDataset(Dataset):
    def __init__(self, n, rng):
        self.rows = []
        for _ in range(n):
            k = int(np.clip(rng.normal(48, 18), 8, 128))
            words = rng.integers(1000, 8000, k)
            labels = rng.integers(0, len(LABELS), k)
            labels[rng.random(k) < 0.2] = -100  # word pieces
            self.rows.append((words, labels))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, labels = self.rows[i]
        return {
            "input_ids": torch.tensor(np.concatenate([[101], words, [102]])),
            "labels": torch.tensor(np.concatenate([[-100], labels, [-100]])),
        }


def collate(features):
    ids = pad_sequence([f["input_ids"] for f in features], batch_first=True, padding_value=0)
    labels = pad_sequence([f["labels"] for f in features], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    losses, preds, golds = [], [], []
    for batch in tqdm(loader, desc="eval", leave=False):
        batch = {k: v.to(device) for k, v in batch.items()}
        out = model(**batch)
        losses.append(out.loss.item())
        p = out.logits.argmax(-1).cpu().numpy()
        y = batch["labels"].cpu().numpy()
        preds.extend(p[y != -100])
        golds.extend(y[y != -100])
    preds, golds = np.array(preds), np.array(golds)
    tp = ((preds == golds) & (golds > 0)).sum()
    precision, recall = tp / max((preds > 0).sum(), 1), tp / max((golds > 0).sum(), 1)
    model.train()
    return float(np.mean(losses)), 2 * precision * recall / max(precision + recall, 1e-9)


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO)
    set_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = np.random.default_rng(args.seed)
    train, dev = NerDataset(120, rng), NerDataset(70, rng)
    train_loader = DataLoader(
        train, args.train_batch_size, shuffle=True, collate_fn=collate, num_workers=2, pin_memory=True
    )
    dev_loader = DataLoader(dev, args.eval_batch_size, collate_fn=collate)
    config = BertConfig(
        vocab_size=8000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=len(LABELS),
        id2label=dict(enumerate(LABELS)),
        label2id={l: i for i, l in enumerate(LABELS)},
    )
    model = BertForTokenClassification(config).to(device)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=1e-8)
    total = len(train_loader) * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * total), total)
    best = -1.0
    for epoch in range(args.epochs):
        running = 0.0
        for step, batch in enumerate(tqdm(train_loader, desc=f"epoch {epoch}")):
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += loss.item()
        dev_loss, f1 = evaluate(model, dev_loader, device)
        logger.info("epoch %d train %.4f dev %.4f f1 %.4f", epoch, running / len(train_loader), dev_loss, f1)
        if f1 > best:
            best = f1
            torch.save(model.state_dict(), Path(args.output_dir) / "best.pt")
    model.load_state_dict(torch.load(Path(args.output_dir) / "best.pt", map_location=device))
    print("final", evaluate(model, dev_loader, device))


if __name__ == "__main__":
    main()
