"""The default step: a model, its inputs and its loss, as a plain PyTorch loop trains or calls it.

    build on the host, move to the device, then for every iteration:
    forward, loss, backward (once a micro-batch), clip, optimizer step, scheduler, zero_grad

Loops written by hand hold the model's output in a variable, ``outputs = model(**batch)``: logits and caches live
through the backward pass and the next forward, until the next output takes their place (``loop="hold"``). Where a loop
writes ``loss = model(**batch).loss`` or returns the loss from a function of its own, as transformers' Trainer does
(``Trainer.compute_loss``), they are dropped once the loss exists (``loop="drop"``). One run gives both where it can
(:mod:`graphmem.capture.loop.held_output`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphmem.capture.loop.optimizers.build import make_optimizers
from graphmem.capture.loop.strategies import Strategies, check_precision
from graphmem.capture.loop.training_loop import (
    Batch,
    Loader,
    TrainingLoop,
    autocast,
    batch_on_device,
    call,
    compiled,
)
from graphmem.training import Inference, Training
from graphmem.training.epochs import BatchSize

if TYPE_CHECKING:
    from graphmem.capture.record.both_loops import BothLoops
    from graphmem.capture.session.session import Session

from collections.abc import Callable
from typing import Any

from graphmem.errors import CaptureError

#: Iterations when the user names no number. The second has the optimizer's state and reuses the first one's segments;
#: a third finds the rare step whose fragmentation still grows, and is left out where an iteration has more operators
#: than this, because it takes long and so many storages hardly move the heap any more.
DEFAULT_ITERATIONS, MANY_OPERATORS = 3, 5000


@dataclass(frozen=True)
class Ran:
    """The results of a loop that is over: remarks for the reader, and the largest bytes of an output of the model that
    only a variable of the loop can hold (beyond its parameters and inputs)."""

    remarks: list[str]
    output_bytes: int


def run_training(
    session: Session,
    model: nn.Module,
    inputs: object,
    loss: object,
    training: Training,
    iterations: int | None,
    own_optimizer: type[torch.optim.Optimizer] | None = None,
    loader: Loader | None = None,
    both: BothLoops | None = None,
) -> Ran:
    """Run ``iterations`` training iterations of the default loop on a model that is on the host or the device.

    ``own_optimizer`` is the class that ``training`` names, if it is the user's and imported already. ``loader`` gives
    batches that differ or are moved ahead, in place of ``inputs`` and ``loss``. ``both`` takes the differences between
    the loop that holds the output and the one that drops it; without one the loop that ``training`` names is run.
    """
    check_precision(model, training)
    if training.pp is not None:
        from graphmem.capture.loop.pipeline import check_for_pipeline, pipeline_loop

        check_for_pipeline(inputs, loss, training)
    strategies = Strategies(training)
    if not strategies.wait_for_batch:
        model = strategies.place(session, model)
    for one in strategies:
        inputs = one.inputs(inputs)
    batch = Batch(inputs, loss)
    if loader is None:
        batch = batch_on_device(session, batch, training.dtype)
    model.train()
    if training.checkpoint_activations:
        checkpoint_blocks(model)
    if training.pp is not None:
        loop, remarks = pipeline_loop(session, model, batch, strategies, own_optimizer)
    elif training.zero is not None:
        from graphmem.capture.loop.engine import engine_loop

        loop, remarks = engine_loop(session, model, batch, strategies, own_optimizer, loader)
    else:
        if strategies.wait_for_batch:
            model = strategies.place(session, model)
        for one in strategies:
            model = one.wrapped(model)
        optimizers, remarks = make_optimizers(model, training, own_optimizer)
        loop = TrainingLoop(session, model, optimizers, strategies, loader)
    loop.batch = batch
    if both is not None:
        loop.cover_both(both)
    del batch, inputs, loss
    if loader is not None and training.epoch.varies:
        _run_epochs(session, loop, loader)
    else:
        _run_alike(session, loop, iterations, None if loader is None else loader.epoch[0])
    return Ran(remarks, loop.output_bytes)


def _run_epochs(session: Session, loop: TrainingLoop, loader: Loader) -> None:
    """Iterations on batches that differ, epoch after epoch."""
    for number, step in enumerate(loader.iterations):
        if number % loop.training.epoch.steps == 0:
            loop.go_through(loader.epoch)
        session.begin_iteration()
        loop.step(step.micro_batches)
        if step.evaluated:
            loop.evaluate(step.evaluated)


def _run_alike(session: Session, loop: TrainingLoop, iterations: int | None, size: BatchSize | None = None) -> None:
    """Iterations on one batch, or on batches of one ``size``: as many as were asked for, else as many as settle it."""
    begun, of_history = 0, loop.of_history
    if size is not None:
        loop.go_through(itertools.repeat(size))
    for number in range(iterations or max(DEFAULT_ITERATIONS, of_history)):
        before = session.operator_count
        if number >= 2 and not of_history and iterations is None and before - begun > MANY_OPERATORS:
            break
        begun = before
        session.begin_iteration()
        loop.step([size] * loop.training.grad_accum)
    loop.end()


def run_inference(session: Session, model: nn.Module, inputs: object, inference: Inference, iterations: int) -> None:
    """Run ``iterations`` forward passes without gradients; an output lives until the next call."""
    model = Strategies(inference).place(session, model)
    inputs = batch_on_device(session, Batch(inputs), inference.dtype).inputs
    model.eval()
    called = compiled(model, inference.compile)
    for _ in range(iterations):
        session.begin_iteration()
        with torch.no_grad(), autocast(inference):
            output = call(called, inputs)
        del output


# --- activation checkpointing -----------------------------------------------------------------------------------------


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute the model's repeated blocks in the backward pass.

    A model that knows how (transformers' ``gradient_checkpointing_enable``, lately ``activation_checkpointing_enable``,
    timm's ``set_grad_checkpointing``) does it itself; elsewhere every element of the outermost lists of blocks
    (``nn.ModuleList``, ``nn.Sequential``) is checkpointed without reentrant autograd.
    """
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing"):
        enable: Callable[[], None] | None = getattr(model, method, None)
        if enable is not None:
            enable()
            return
    from graphmem.capture.distributed.sharded_model import outermost_blocks

    blocks = outermost_blocks(model)
    if not blocks:
        raise CaptureError("no repeated blocks found to checkpoint; call torch.utils.checkpoint in the model itself")
    for block in blocks:
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., object]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def run(*args: object, **kwargs: object) -> object:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
