"""A training loop that is predicted before its first step, measured over the next ones, and compared.

    with graphmem.watch(model, optimizer):
        for batch in loader: ...

The first batch is analysed as :func:`graphmem.analyze` does, with the optimizer that the loop has. On a card the peaks
of each phase of the first steps are then read from PyTorch (``torch.cuda.max_memory_allocated``), and the first phase
that goes another way is named. Without a card there is the prediction alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from graphmem.base.spellings import also_named
from graphmem.devices import Device, custom_device, device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.reports import Answer
from graphmem.reports.document import Document, Text, section, table
from graphmem.training import Training
from graphmem.training.optimizers import OPTIMIZERS, freeze
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from torch import nn, optim

#: Steps that are predicted and measured: memory repeats from the second or third on.
STEPS = 3
#: Up to which share of the measured bytes a phase is as predicted.
_ALIKE = 0.01

#: (allocated, reserved) bytes at most since it was last called; None where there is no card.
Meter = Callable[[], "tuple[int, int] | None"]


@dataclass(frozen=True)
class MeasuredPhase:
    """The peaks of PyTorch's allocator in one phase, and those that were predicted for it, in bytes."""

    iteration: int
    name: str
    allocated_bytes: int
    reserved_bytes: int
    predicted_allocated_bytes: int
    predicted_reserved_bytes: int

    @property
    def change_bytes(self) -> int:
        """Predicted less measured allocated bytes."""
        return self.predicted_allocated_bytes - self.allocated_bytes


@dataclass(frozen=True)
class Watched(Answer):
    """What was predicted for a loop, and what its first steps took; ``phases`` is empty without a card."""

    estimate: Estimate
    phases: tuple[MeasuredPhase, ...] = ()

    @property
    def parts_at(self) -> MeasuredPhase | None:
        """The first phase that is more than a hundredth away from its prediction."""
        return next((one for one in self.phases if abs(one.change_bytes) > _ALIKE * one.allocated_bytes), None)

    def document(self, *, details: bool = False) -> Document:
        """The prediction and the measurement, phase by phase."""
        if not self.phases:
            return self.estimate.document(details=details)
        columns = {"phase": "", "predicted": "bytes", "measured": "bytes", "difference": "change"}
        rows = [
            (f"{one.iteration} {one.name}", one.predicted_allocated_bytes, one.allocated_bytes, one.change_bytes)
            for one in self.phases
        ]
        title = f"{self.estimate.model}: predicted and measured"
        sections = (
            section("", Text(list(self._sentences()))),
            section("Allocated at most, by phase", table(columns, rows, titled=True)),
        )
        return Document("watched", title, sections, self.to_dict)

    def to_dict(self) -> Mapping[str, Any]:
        """All figures (schema ``graphmem.watched/1``; memory in bytes)."""
        phases = [{**asdict(one), "change_bytes": one.change_bytes} for one in self.phases]
        return {"schema": "graphmem.watched/1", "estimate": self.estimate.to_dict(), "phases": phases}

    def _sentences(self) -> Iterator[str]:
        for level in ("allocated", "reserved"):
            predicted = max(getattr(one, f"predicted_{level}_bytes") for one in self.phases)
            measured = max(getattr(one, f"{level}_bytes") for one in self.phases)
            share = f"{100 * (predicted - measured) / measured:+.1f} %" if measured else "nothing was measured"
            yield f"{level}: predicted {format_bytes(predicted)}, measured {format_bytes(measured)} ({share})."
        part = self.parts_at
        if part is None:
            yield "No phase parts from its prediction by more than 1 %."
        else:
            apart = format_bytes(abs(part.change_bytes))
            yield f"They part first in iteration {part.iteration} {part.name}, by {apart}."


class Watch:
    """Follows one loop; :func:`watch` makes it. ``answer`` is None until the first batch, and whole after the steps."""

    def __init__(self, training: Training, card: Device | None, say: Callable[[str], None], meter: Meter) -> None:
        self.answer: Watched | None = None
        self._training, self._card, self._say, self._meter = training, card, say, meter
        self._peaks: dict[tuple[int, str], tuple[int, int]] = {}
        self._iteration = 1
        self._hook: Callable[[], Sequence[Any]] = tuple
        self._handles: Sequence[Any] = ()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, model: nn.Module, optimizer: optim.Optimizer) -> Watch:
        """Follow a loop that calls the model and steps the optimizer."""
        self._hook = lambda: (
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(lambda *_: self.ends("forward")),
            *self.steps_of(optimizer),
        )
        self._handles = self._hook()
        return self

    def steps_of(self, optimizer: optim.Optimizer) -> tuple[Any, Any]:
        """The handles of hooks that end the phases around the optimizer's steps."""
        return (
            optimizer.register_step_pre_hook(lambda *_: self.ends("backward")),
            optimizer.register_step_post_hook(lambda *_: self.ends("optimizer")),
        )

    def begin(self, model: nn.Module, inputs: object) -> None:
        """Predict for this batch. What cannot be analysed is said, and the loop goes on."""
        from graphmem.analyze import analyze

        self._unhook()  # the hooks are no part of the model
        try:
            estimate = analyze(model, inputs, training=self._training, device=self._card, iterations=STEPS)
        except GraphmemError as error:
            self._say(f"graphmem: not predicted: {error}")
            return
        self.answer = Watched(estimate)
        self._say(str(self.answer))
        if self._meter() is not None:
            self._handles = self._hook()

    def ends(self, phase: str) -> None:
        """A phase ends here; the optimizer's is the last of its iteration."""
        found = self._meter() if self.answer is not None and self._iteration <= STEPS else None
        if found is None:
            return
        before = self._peaks.get((self._iteration, phase), (0, 0))
        self._peaks[self._iteration, phase] = (max(before[0], found[0]), max(before[1], found[1]))
        if phase == "optimizer":
            self._iteration += 1
            if self._iteration > STEPS:
                self.stop()

    def stop(self) -> None:
        """Look no further, and compare what was measured."""
        self._unhook()
        if self.answer is not None and self._peaks and not self.answer.phases:
            self.answer = replace(self.answer, phases=tuple(self._compared(self.answer.estimate)))
            self._say(str(self.answer))

    def _before_forward(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        import torch

        if self.answer is None and torch.is_grad_enabled():
            self.begin(model, inputs_of(model, arguments, named))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def _compared(self, estimate: Estimate) -> Iterator[MeasuredPhase]:
        predicted = {(one.iteration, one.name): one.peak for one in estimate.phases}
        for (iteration, name), (allocated, reserved) in self._peaks.items():
            peak = predicted.get((iteration, name))
            if peak is not None:
                yield MeasuredPhase(iteration, name, allocated, reserved, peak.allocated_bytes, peak.reserved_bytes)


@also_named("device", "gpu")
def watch(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    training: Training | None = None,
    device: str | Device | None = None,
    say: Callable[[str], None] = print,
) -> Watch:
    """A context in which the loop is predicted at its first batch, measured over three steps, and compared.

    ``training``: the step where it has more to it than the optimizer (autocast, accumulated gradients); the optimizer's
    class and options are read from ``optimizer``. ``device``: the card; by default the one that is there. The answer, a
    :class:`Watched`, is given to ``say`` as text, and is ``.answer`` of what the context gives. Peaks are read by
    ``torch.cuda.reset_peak_memory_stats``. What cannot be predicted is said, and the loop goes on.
    """
    card = device_named(device) if isinstance(device, str) else device
    step = replace(training or Training(), **optimizer_of(optimizer))
    return Watch(step, card or card_here(), say, meter).follow(model, optimizer)


def optimizer_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """The fields of a :class:`Training` about an optimizer that is there: its class, and options that are not usual."""
    kind = type(optimizer)
    name = kind.__name__.lower()
    known = OPTIMIZERS.get(name)
    usual = {key: one.default for key, one in inspect.signature(kind).parameters.items()}
    if known is None or not kind.__module__.startswith(known.library):
        name = f"{kind.__module__}:{kind.__qualname__}"
    found = []
    for key, value in optimizer.defaults.items():
        if key in (usual if known is None else known.options) and value != usual.get(key):
            with contextlib.suppress(TypeError):  # a tensor: a learning rate that is captured
                found.append((key, freeze(value)))
    return {"optimizer": name, "optimizer_args": tuple(found)}


def inputs_of(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The arguments of a call as an analysis takes them: in a tuple, or all of them by name."""
    if not named:
        return arguments
    return {**inspect.signature(model.forward).bind_partial(*arguments).arguments, **named}


def card_here() -> Device | None:
    """The card that PyTorch uses, None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    name, size = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    try:
        return replace(device_named(name), capacity_bytes=size)
    except UsageError:
        return custom_device(size)


def meter() -> tuple[int, int] | None:
    """The peaks of PyTorch's allocator since it was last asked; None without a card."""
    import torch

    if not torch.cuda.is_available():
        return None
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks
