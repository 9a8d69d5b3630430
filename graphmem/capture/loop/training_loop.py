"""The loop of a default step: a plain PyTorch loop over a model, its inputs and its loss."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphmem.capture.device.pretend_device import move
from graphmem.capture.loop.held_output import held_by
from graphmem.capture.loop.optimizers.build import iterations_of_history, scheduler_of
from graphmem.capture.loop.prefetching import prefetched
from graphmem.capture.loop.strategies import Strategies
from graphmem.capture.values.tensors import DTYPES, tensors_in
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training
from graphmem.training.epochs import BatchSize, Iteration

if TYPE_CHECKING:
    from graphmem.capture.record.both_loops import BothLoops
    from graphmem.capture.session.session import Session


@dataclass(frozen=True)
class Batch:
    """One batch of a loader: the model's inputs, and the loss where the model does not make it."""

    inputs: Any
    loss: Any = None


@dataclass(frozen=True)
class Loader:
    """Batches that are moved to the card one by one: ``iterations`` in order, each batch made on the host by
    ``batch_of``. ``epoch``: the batches from one end of the loader to the other."""

    iterations: Sequence[Iteration]
    epoch: Sequence[BatchSize]
    batch_of: Callable[[BatchSize], Batch]


def batch_on_device(session: Session, batch: Batch, dtype: str) -> Batch:
    """``batch`` on the card, its floating-point inputs in ``dtype``, and known as the step's inputs."""
    weights, loss = DTYPES[dtype], batch.loss
    inputs = move(batch.inputs, weights if weights is not torch.float32 else None)
    session.label_inputs(inputs)
    if hasattr(loss, "targets"):
        loss = copy.copy(loss)
        loss.targets = move(loss.targets)
        session.label_inputs(loss.targets, "targets")
    return Batch(inputs, loss)


def _tensors_of_batch(batch: Batch) -> Iterator[torch.Tensor]:
    yield from tensors_in(batch.inputs)
    yield from tensors_in(getattr(batch.loss, "targets", None))


def _loss_of(output: Any, loss: Callable[..., Any] | None) -> Any:
    """The loss of an output. An error in it has it as its ``place``, as the module that ran last is none of it."""
    try:
        return default_loss(output) if loss is None else loss(output)
    except Exception as error:
        error.place = "the loss"  # type: ignore[attr-defined]
        raise


class TrainingLoop:
    """The variables of a loop written by hand. Each lives until it is assigned again."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        strategies: Strategies,
        loader: Loader | None = None,
    ) -> None:
        training = strategies.training
        self.training, self.strategies = training, strategies
        self.of_history = iterations_of_history(optimizers[0]) if optimizers else 0
        self.batch: Batch | None = None
        self.output: Any = None
        self.loss: Any = None
        self.output_bytes = 0
        self._both: BothLoops | None = None
        self._session, self._model, self._optimizers, self._loader = session, model, optimizers, loader
        self._ahead: Iterator[Batch] | None = None  # what gives batches that are on the card before their turn
        self._called = compiled(model, training.compile)
        self._scaler = torch.amp.GradScaler("cuda") if training.scales_loss else None
        self._schedulers = [scheduler_of(training.lr_scheduler, one) for one in optimizers if training.lr_scheduler]
        if self.of_history and self._scaler:
            raise CaptureError("lbfgs evaluates the loss itself, which torch.amp.GradScaler does not support; use bf16")
        if self.of_history and training.zero_grad_at != "after_step":
            raise CaptureError("lbfgs clears gradients before it evaluates the loss; leave out zero_grad_at")

    def cover_both(self, both: BothLoops) -> None:
        """Drop the output, and note in ``both`` the storages that a loop holding it would keep, and how long."""
        if self.of_history:
            both.give_up()  # the optimizer evaluates the loss itself
        self._both = both

    def step(self, micro_batches: Sequence[BatchSize | None]) -> None:
        """One optimizer step; None stands for the batch that is on the device already."""
        if self.of_history:
            self._closure_step(micro_batches)
            return
        self._gradients(micro_batches)
        self._optimizer_step()
        if self._both is not None and self._both.covers_both:
            with self._both.loss_dropped():
                self.loss = None
        elif self.training.loop == "drop":
            self.loss = None

    def end(self) -> None:
        """The iterations are over, and the loop's variables go."""
        self.output = None
        if self._both is not None:
            self._both.output_assigned()
        self.loss = None
        if self._both is not None:
            self._both.loss_assigned()

    def _gradients(self, micro_batches: Sequence[BatchSize | None]) -> None:
        """Load each micro-batch and run both passes on it; gradients are set to zero before the first where asked."""
        training = self.training
        for number, size in enumerate(micro_batches):
            if number == 0 and training.zero_grad_at == "before_forward":
                self._zero_grad()
            self._next_batch(size)
            with self._micro_batch(is_last=number == len(micro_batches) - 1):
                self._forward()
                if len(micro_batches) > 1:
                    self.loss = self.loss / len(micro_batches)
                if number == 0 and training.zero_grad_at == "before_backward":
                    self._zero_grad()
                (self._scaler.scale(self.loss) if self._scaler else self.loss).backward()

    def _micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of the passes of one micro-batch, as the strategies share it out."""
        assert self.batch is not None
        stack = contextlib.ExitStack()
        for one in self.strategies:
            stack.enter_context(one.micro_batch(self._model, self.batch.inputs, is_last))
        return stack

    def go_through(self, sizes: Iterable[BatchSize]) -> None:
        """The next batches are those of a loader from its begin to its end."""
        if self.training.prefetch:
            self._ahead = prefetched(sizes, self.training.prefetch, self._moved, _tensors_of_batch)

    def _next_batch(self, size: BatchSize | None) -> None:
        """``for batch in loader: batch = batch.to("cuda")``: the loop's variable lets the batch before go first; of
        batches that are prefetched it does not."""
        if self._ahead is not None:
            self.batch = next(self._ahead)
        elif size is not None and self._loader is not None:
            self.batch = self._loader.batch_of(size)
            self.batch = self._moved(size)

    def _moved(self, size: BatchSize) -> Batch:
        assert self._loader is not None
        return batch_on_device(self._session, self._loader.batch_of(size), self.training.dtype)

    def _forward(self) -> None:
        """The loss of the batch; former values of the variables live until they are assigned."""
        assert self.batch is not None
        inputs, loss = self.batch.inputs, self.batch.loss
        with autocast(self.training):
            self.output = call(self._called, inputs)
            if self._both is not None:
                self._both.output_assigned()
            self._note_output(self.output)
            made = _loss_of(self.output, loss)
            self._drop_output(made)
            self.loss = made
            if self._both is not None:
                self._both.loss_assigned()
        check_loss(self.loss)

    def _drop_output(self, loss: object) -> None:
        """The loss exists; nothing else of the output stays alive, unless the loop holds it."""
        if self._both is not None and self._both.covers_both:
            kept = held_by((self.output,), loss)
            if kept is not None:
                with self._both.output_dropped(kept):
                    self.output = None
                return
            self._both.give_up()
        if self.training.loop == "drop":
            self.output = None

    def _note_output(self, output: object) -> None:
        self.output_bytes = max(self.output_bytes, _bytes_of(output))

    def evaluate(self, sizes: Sequence[BatchSize]) -> None:
        """Forward passes without gradients, in evaluation mode, in the loop's own variables; then back to training."""
        self._model.eval()
        self.go_through(sizes)
        for size in sizes:
            self._next_batch(size)
            assert self.batch is not None
            inputs, loss = self.batch.inputs, self.batch.loss
            with torch.no_grad(), autocast(self.training):
                if self.training.loop == "hold":
                    self.output = call(self._called, inputs)
                    if loss is not None:
                        self.loss = loss(self.output)
                elif loss is not None:
                    loss(call(self._called, inputs))
                else:
                    call(self._called, inputs)
        self._model.train()

    def _optimizer_step(self) -> None:
        scaler, training = self._scaler, self.training
        if training.clip_grad_norm is not None:
            if scaler:
                for optimizer in self._optimizers:
                    scaler.unscale_(optimizer)
            self._clip(training.clip_grad_norm)
        for optimizer in self._optimizers:
            if scaler:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler:
            scaler.update()
        self._schedule()
        if training.zero_grad_at == "after_step":
            self._zero_grad()

    def _clip(self, most: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), most)

    def _schedule(self) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.loss.detach())
            else:
                scheduler.step()

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            how = self.training.zero_grad
            optimizer.zero_grad(**({} if how is None else {"set_to_none": how == "set_to_none"}))

    def _closure_step(self, micro_batches: Sequence[BatchSize | None]) -> None:
        """A step that evaluates the loss as often as it likes, as in the documentation of ``torch.optim``: the output
        is a variable of the closure."""
        optimizer: Any = self._optimizers[0]

        def closure() -> torch.Tensor:
            self._zero_grad()
            self._gradients(micro_batches)
            if self.training.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), self.training.clip_grad_norm)
            value, self.loss, self.output = self.loss, None, None
            return value

        optimizer.step(closure)
        self._schedule()


def autocast(step: Training | Inference) -> contextlib.AbstractContextManager[object]:
    """PyTorch's autocast where the step asks for it; a wrapper that casts itself takes its place."""
    casts = None if isinstance(step, Training) and step.casts_itself else step.amp
    return torch.autocast("cuda", DTYPES[casts]) if casts else contextlib.nullcontext()


def compiled(model: nn.Module, mode: str | None) -> nn.Module:
    """``model``, by ``torch.compile`` if a ``mode`` is given."""
    return model if mode is None else torch.compile(model, mode=mode)


def check_loss(value: object) -> None:
    """Raises :class:`CaptureError` for a value that no backward pass can begin with."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise CaptureError(
            f"the loss is {_describe(value)}; it should be a tensor of one element that requires a gradient. "
            "Return a loss from the factory: (model, inputs, loss) or (model, inputs, targets, loss)"
        )


def default_loss(output: object) -> torch.Tensor:
    """``output.loss`` if there is one, else the mean of the first floating-point tensor of the output."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    for tensor in tensors_in(output):
        if tensor.is_floating_point():
            return tensor.mean()
    raise CaptureError("the model's output has no floating-point tensor; return a loss from the factory")


def _bytes_of(output: object) -> int:
    """The bytes of the storages behind an output's tensors, each counted once."""
    return sum({one._cdata: one.nbytes() for one in map(torch.Tensor.untyped_storage, _tensors_of(output))}.values())


def _tensors_of(value: object, depth: int = 6) -> Iterator[torch.Tensor]:
    """Tensors in nested values and in the attributes of objects, as caches of keys and values have them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for item in _parts_of(value):
            yield from _tensors_of(item, depth - 1)


def _parts_of(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) else ()


def call(model: nn.Module, inputs: object) -> object:
    """The model's output for its inputs, which are named, in order, or one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        gradient = "" if value.requires_grad else ", without gradient"
        return f"a tensor of shape {tuple(value.shape)}{gradient}"
    return f"a {type(value).__name__}"
