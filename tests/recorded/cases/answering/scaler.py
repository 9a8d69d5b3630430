"""Lightning's batch size scaler: doubles the batch until it fails (``power``), then looks between (``binsearch``); the
model and the optimizer stay. (Written anew, after ``pytorch_lightning/tuner/batch_size_scaling.py`` 2.5.)"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch

from tests.recorded.cases.answering.network import Gpt, batch_of

STEPS_PER_TRIAL, MOST_TRIALS = 3, 25


def is_oom_error(error: BaseException) -> bool:
    """``lightning.fabric``'s question about a ``RuntimeError``."""
    text = error.args[0] if isinstance(error, RuntimeError) and len(error.args) == 1 else ""
    return "CUDA" in text and "out of memory" in text


def collect_garbage() -> None:
    """``garbage_collection_cuda``."""
    gc.collect()
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if not is_oom_error(error):
            raise


class Trainer:
    """Fits a few steps of a batch size, and keeps what it learned."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Gpt()
        self.optimizer: torch.optim.Optimizer | None = None
        self.batch_size = 1
        self.failed: list[int] = []

    def fit(self) -> None:
        """One trial."""
        self.model.to("cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        for _ in range(STEPS_PER_TRIAL):
            tokens, targets = batch_of(self.batch_size)
            self.optimizer.step(lambda: self.closure(tokens, targets))  # noqa: B023

    def closure(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Lightning's order: forward, zero the gradients, backward."""
        assert self.optimizer is not None
        loss = self.model(tokens, targets)
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def succeeds(self) -> bool:
        """Whether a trial fits into memory."""
        collect_garbage()
        try:
            self.fit()
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
            self.failed.append(self.batch_size)
            collect_garbage()
            return False
        return True


def binary_search(trainer: Trainer) -> None:
    """``_run_binary_scaling``."""
    low, high = 1, None
    for _ in range(MOST_TRIALS):
        if trainer.succeeds():
            low = trainer.batch_size
            if high is not None:
                if high - low <= 1:
                    break
                trainer.batch_size = (high + low) // 2
            else:
                trainer.batch_size *= 2
        else:
            high = trainer.batch_size
            trainer.batch_size = (high + low) // 2
            if high - low <= 1:
                break


def main() -> Mapping[str, int]:
    """Look for the batch, then train with it."""
    trainer = Trainer()
    binary_search(trainer)
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.fit()
    return {
        "batch size": trainer.batch_size,
        "failures": len(trainer.failed),
        "allocated after the search": allocated,
        "most allocated with it": torch.cuda.max_memory_allocated(),
        "most reserved with it": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "errors": torch.cuda.memory_stats()["num_ooms"],
    }
