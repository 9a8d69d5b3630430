"""A hand-written loop that halves the batch when memory runs out. The cache is emptied inside the ``except`` clause,
where the exception still holds the frames, and with them the tensors, of the step that failed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.recorded.cases.answering.network import Gpt, batch_of


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> None:
    """One step, with a name for the activations that an exception keeps alive."""
    tokens, targets = batch_of(batch_size)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main() -> Mapping[str, int]:
    """The first batch that runs five steps."""
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch_size, found = 256, {}
    while batch_size:
        try:
            for _ in range(5):
                train_step(model, optimizer, batch_size)
            break
        except torch.cuda.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            found[f"allocated in the handler at {batch_size}"] = torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            found[f"reserved in the handler at {batch_size}"] = torch.cuda.memory_reserved()
            batch_size //= 2
        found[f"allocated after it, for {batch_size}"] = torch.cuda.memory_allocated()
    return found | {
        "batch size": batch_size,
        "most allocated": torch.cuda.max_memory_allocated(),
        "most reserved": torch.cuda.max_memory_reserved(),
        "reserved": torch.cuda.memory_reserved(),
    }
