"""Batches that are moved to the card ahead of the step that uses them, on a stream of their own.

Loops written by hand have the ``data_prefetcher`` of NVIDIA's ImageNet example and its kin: copies with
``non_blocking=True`` on a side stream, for which the step's stream waits, ``record_stream`` so that no one takes the
batch's memory while the step runs, and the next copy begun before this batch is handed over. Batches lie in segments of
that stream, which nothing else uses.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Size = TypeVar("Size")
Moved = TypeVar("Moved")


def prefetched(
    sizes: Iterable[Size],
    count: int,
    move: Callable[[Size], Moved],
    tensors_of: Callable[[Moved], Iterable[torch.Tensor]],
) -> Iterator[Moved]:
    """Every batch of a loader, once ``move`` has put it and, as long as there are so many, the next ``count`` on the
    card."""
    stream, coming, waiting = torch.cuda.Stream(), iter(sizes), deque[Moved]()

    def fetch() -> None:
        for size in itertools.islice(coming, count - len(waiting)):
            with torch.cuda.stream(stream):
                waiting.append(move(size))

    fetch()
    while waiting:
        current = torch.cuda.current_stream()
        current.wait_stream(stream)
        batch = waiting.popleft()
        for tensor in tensors_of(batch):
            tensor.record_stream(current)
        fetch()
        yield batch
