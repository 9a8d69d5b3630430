"""The decorator of ``accelerate.utils.find_executable_batch_size``, as its users put it around their training function:
everything is made inside, a failure makes the batch a tenth smaller. (Written anew, with the same order of steps.)"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.recorded.cases.answering.network import Gpt, batch_of

_WORDS = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")


def should_reduce_batch_size(error: Exception) -> bool:
    """Whether an error speaks of memory, in an exception with one argument."""
    if not isinstance(error, RuntimeError) or len(error.args) != 1:
        return False
    return any(words in error.args[0] for words in _WORDS)


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def find_executable_batch_size(starting_batch_size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call the function with a batch size that it can do, beginning with this one."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            batch_size = starting_batch_size
            _clear()
            while True:
                if batch_size == 0:
                    raise RuntimeError("No executable batch size found, reached zero.")
                try:
                    return function(batch_size, *args, **kwargs)
                except Exception as error:
                    if not should_reduce_batch_size(error):
                        raise
                    _clear()
                    batch_size = int(batch_size * 0.9)

        return call

    return decorate


def main() -> Mapping[str, int]:
    """Train three steps with the largest batch."""
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=48)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        torch.manual_seed(0)
        model = Gpt().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for _ in range(3):
            tokens, targets = batch_of(batch_size)
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    batch_size = train()
    return {
        "batch size": batch_size,
        "tries": len(tried),
        "allocated at the end": torch.cuda.memory_allocated(),
        "reserved at the end": torch.cuda.memory_reserved(),
        "most allocated": torch.cuda.max_memory_allocated(),
        "most reserved": torch.cuda.max_memory_reserved(),
    }
