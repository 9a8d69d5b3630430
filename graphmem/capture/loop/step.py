"""The default step: what a plain PyTorch loop does with a model, its inputs and its loss.

    build on the host, move to the device, then for every iteration:
    forward, loss, backward (once a micro-batch), clip, optimizer step, zero_grad

The model's output is dropped once the loss exists, as in a loop that writes ``loss = criterion(model(x), y)`` and as
the common trainers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphmem.capture.device.pretend_device import DEVICE, move
from graphmem.capture.distributed.data_parallel import data_parallel
from graphmem.capture.loop.checkpointing import checkpoint_blocks
from graphmem.capture.loop.optimizers.build import iterations_of_history, make_optimizers
from graphmem.capture.ports import StepBook
from graphmem.capture.values.tensors import tensors_in
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


#: Iterations when the user names no number. The second has the optimizer's state and reuses the first one's segments;
#: a third finds the rare step whose fragmentation still grows, and is left out where an iteration has more operators
#: than this, because it takes long and so many storages hardly move the heap any more.
DEFAULT_ITERATIONS, MANY_OPERATORS = 3, 5000


def run_training(
    session: StepBook,
    model: nn.Module,
    inputs: Any,
    loss: Any,
    training: Training,
    iterations: int | None,
    own_optimizer: type[torch.optim.Optimizer] | None = None,
) -> list[str]:
    """Run ``iterations`` training iterations of the default loop on a model that is on the host or the device.

    ``own_optimizer`` is the class that ``training`` names, if it is the user's and imported already. Returns remarks
    for the reader.
    """
    model, inputs, loss = _to_device(session, model, inputs, loss, training.dtype)
    model.train()
    if training.checkpoint_activations:
        checkpoint_blocks(model)
    if training.ddp is not None:
        model = data_parallel(model, training.ddp)
    optimizers, remarks = make_optimizers(model, training, own_optimizer)
    scaler = torch.amp.GradScaler("cuda") if training.amp == "fp16" else None
    of_history = iterations_of_history(optimizers[0])
    if of_history and scaler:
        raise CaptureError("lbfgs evaluates the loss itself, which torch.amp.GradScaler does not support; use bf16")

    called = _compiled(model, training.compile)

    def gradients() -> torch.Tensor:
        for number in range(training.grad_accum):
            is_last = number == training.grad_accum - 1
            with contextlib.nullcontext() if training.ddp is None or is_last else model.no_sync():
                value = _forward_loss(called, inputs, loss, training.amp)
                if training.grad_accum > 1:
                    value = value / training.grad_accum
                (scaler.scale(value) if scaler else value).backward()
        return value

    begun = 0
    for number in range(iterations or max(DEFAULT_ITERATIONS, of_history)):
        before = session.operator_count
        if number >= 2 and not of_history and iterations is None and before - begun > MANY_OPERATORS:
            break
        begun = before
        session.begin_iteration()
        if of_history:
            _closure_step(model, optimizers[0], gradients, training)
        else:
            value = gradients()
            _optimizer_step(model, optimizers, scaler, training)
            del value
    return remarks


def run_inference(session: StepBook, model: nn.Module, inputs: Any, inference: Inference, iterations: int) -> None:
    """Run ``iterations`` forward passes without gradients; an output lives until the next call."""
    model, inputs, _ = _to_device(session, model, inputs, None, inference.dtype)
    model.eval()
    called = _compiled(model, inference.compile)
    for _ in range(iterations):
        session.begin_iteration()
        with torch.no_grad(), _autocast(inference.amp):
            output = _call(called, inputs)
        del output


def _compiled(model: nn.Module, mode: str | None) -> Any:
    return model if mode is None else torch.compile(model, mode=mode)


def _to_device(session: StepBook, model: nn.Module, inputs: Any, loss: Any, dtype: str) -> tuple[nn.Module, Any, Any]:
    weights = DTYPES[dtype]
    if not is_quantized(model):
        if weights is not torch.float32:
            model = model.to(weights)
        model = model.to(DEVICE)
    session.label_model(model)
    inputs = move(inputs, weights if weights is not torch.float32 else None)
    session.label_inputs(inputs)
    if hasattr(loss, "targets"):
        loss.targets = move(loss.targets)
        session.label_inputs(loss.targets, "targets")
    return model, inputs, loss


def is_quantized(model: nn.Module) -> bool:
    """Whether transformers has quantised the model while it loaded, onto the card and in its types."""
    return bool(getattr(model, "is_quantized", False))


def _forward_loss(model: nn.Module, inputs: Any, loss: Any, amp: str | None) -> torch.Tensor:
    with _autocast(amp):
        value = loss(_call(model, inputs)) if loss is not None else default_loss(_call(model, inputs))
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise CaptureError(
            f"the loss is {_describe(value)}; it should be a tensor of one element that requires a gradient. "
            "Return a loss from the factory: (model, inputs, loss) or (model, inputs, targets, loss)"
        )
    return value


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss`` if there is one, else the mean of the first floating-point tensor of the output."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    for tensor in tensors_in(output):
        if tensor.is_floating_point():
            return tensor.mean()
    raise CaptureError("the model's output has no floating-point tensor; return a loss from the factory")


def _optimizer_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: Any, training: Training
) -> None:
    if training.clip_grad_norm is not None:
        if scaler:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
    for optimizer in optimizers:
        if scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler:
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=training.zero_grad == "set_to_none")


def _closure_step(model: nn.Module, optimizer: Any, gradients: Callable[[], torch.Tensor], training: Training) -> None:
    """A step that evaluates the loss as often as it likes, as in the documentation of ``torch.optim``."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=training.zero_grad == "set_to_none")
        value = gradients()
        if training.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        return value

    optimizer.step(closure)


def _autocast(amp: str | None) -> Any:
    return torch.autocast("cuda", DTYPES[amp]) if amp else contextlib.nullcontext()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        gradient = "" if value.requires_grad else ", without gradient"
        return f"a tensor of shape {tuple(value.shape)}{gradient}"
    return f"a {type(value).__name__}"
