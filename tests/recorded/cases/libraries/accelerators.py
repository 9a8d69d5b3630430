"""Accelerate's loop."""

from __future__ import annotations

from typing import Any

import torch

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program


def _loaders(accelerator: Any) -> Any:
    tokenizer = text.tokenizer()

    def collate(chosen: list[str]) -> Any:
        encoded = tokenizer(chosen, padding="longest", pad_to_multiple_of=8, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        encoded["labels"] = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        return encoded

    train, held = text.sentences(64, 20, 200), text.sentences(20, 20, 200, seed=1)
    return (
        torch.utils.data.DataLoader(train, collate_fn=collate, batch_size=4),
        torch.utils.data.DataLoader(held, collate_fn=collate, batch_size=8),
    )


def _loop(checkpointing: bool = False, **options: Any) -> Any:
    """The complete example: accumulation, clipping, a scheduler, an evaluation with gathered metrics."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import get_linear_schedule_with_warmup

    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    set_seed(42)
    train_loader, eval_loader = _loaders(accelerator)
    model = text.llama()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    model.train()
    for step, batch in enumerate(train_loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step == 5:
            break
    model.eval()
    losses = []
    for batch in eval_loader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(8)))
    mean = torch.mean(torch.cat(losses)).item()
    accelerator.print(f"perplexity of {mean}")
    return accelerator, model, optimizer


@program("transformers", "accelerate")
def accelerate_bf16() -> Any:
    return _loop(mixed_precision="bf16")


@program("transformers", "accelerate")
def accelerate_fp16_checkpointing() -> Any:
    return _loop(mixed_precision="fp16", checkpointing=True)


@program("transformers", "accelerate")
def accelerate_plain() -> Any:
    return _loop()
