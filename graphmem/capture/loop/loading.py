"""Batches of several sizes, or moved ahead, for the default step, made on the host when a loader would give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphmem.capture.loop.training_loop import Batch, Loader
from graphmem.capture.values.tensors import tensors_in
from graphmem.errors import CaptureError
from graphmem.training import Training
from graphmem.training.epochs import BatchSize

if TYPE_CHECKING:
    from graphmem.sources.base import Built, Sizes


def loader_for(
    build: Callable[[Sizes], Built | None], built: Built, sizes: Sizes, training: Training, iterations: int | None
) -> Loader:
    """The loader of a step whose batches differ, or are moved ahead.

    ``built`` is what ``build(sizes)`` gave (:class:`graphmem.sources.base.Built`). Where it cannot make batches of
    other sizes, the model is built once more for every size, on the host, and only the batch of it is kept.
    """
    if not training.epoch.varies:
        return _of_one_size(built)
    known: dict[BatchSize, Batch] = {}

    def batch_of(size: BatchSize) -> Batch:
        if size not in known:
            wanted = replace(sizes, batch=size.batch, seq_len=size.seq_len)
            if built.batch_of is not None:
                known[size] = Batch(built.batch_of(wanted))
            else:
                other = build(wanted)
                assert other is not None  # it has built the model before
                _check_host(other.model)
                known[size] = Batch(other.inputs, other.loss)
        return known[size]

    steps = training.epoch.iterations(sizes.batch, sizes.seq_len, iterations)
    for step in steps:
        for size in (*step.micro_batches, *step.evaluated):
            batch_of(size)  # before the model is on the device
    return Loader(steps, training.epoch.sizes(sizes.batch, sizes.seq_len), batch_of)


def _of_one_size(built: Built) -> Loader:
    """The batch that was built, again and again."""
    _check_inputs(built.inputs)
    batch = Batch(built.inputs, built.loss)
    return Loader((), (BatchSize(),), lambda _: batch)


def _check_inputs(inputs: object) -> None:
    """Raises :class:`CaptureError` for a batch that its factory puts on the card: there is nothing to move ahead."""
    if any(tensor.is_cuda for tensor in tensors_in(inputs)):
        raise CaptureError("prefetch moves batches from the host; let the factory leave its inputs there")


def _check_host(model: nn.Module) -> None:
    """Raises :class:`CaptureError` for a model that its factory puts on the card: a second one would be counted."""
    if any(isinstance(parameter, torch.Tensor) and parameter.is_cuda for parameter in model.parameters()):
        raise CaptureError(
            "batches of several sizes are made by calling the factory once for each; let it leave the model on the host"
        )
