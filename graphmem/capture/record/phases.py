"""The place in a run of each recorded operator: iterations, their stages, and work beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from graphmem.capture.record.storages import Storages
from graphmem.trace import Category

#: Stages of forward passes.
_FORWARD = ("forward", "prefill", "decode")


class Phases:
    """The iteration and the stage that run now.

    ``current`` is the number of the phase in the trace, ``iteration`` 0 while the model is built, ``stage`` one of
    ``build``, ``forward``, ``backward``, ``optimizer``, ``prefill`` and ``decode``."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.current = storages.builder.phase(0, "build")
        self.iteration = 0
        self.stage = "build"
        self._aside = ""  # the stage beside it that runs now
        self.names_stages = False  # whether evaluation, generation and saving are stages: in whole programs
        self.in_optimizer_step = False
        self.forward_passes = self.backward_passes = 0  # calls of outermost modules; at least one each pass
        self.passes_aside: list[int] = []  # rows at which forward passes of evaluation and generation began
        self.on_generation: Callable[[], None] | None = None  # called before the first one
        self.say: Callable[[str], None] = lambda _: None  # called whenever a stage begins

    def begin_iteration(self, stage: str = "forward") -> None:
        """Begin the next iteration, with its forward pass."""
        self.iteration += 1
        self.enter(stage)

    def begin_generation(self) -> None:
        """Tokens will be generated, for the first time or once more."""
        if self.on_generation is not None:
            begun, self.on_generation = self.on_generation, None
            begun()

    def enter(self, stage: str) -> None:
        """Begin a stage: ``forward``, ``backward``, ``optimizer``; ``prefill``, ``decode``."""
        self.stage, self._aside = stage, ""
        self._storages.born_as = Category.ACTIVATION if stage in _FORWARD else Category.TEMPORARY
        self.current = self._storages.builder.phase(self.iteration, stage)
        self._storages.operator = self._storages.builder.operator(f"({stage})", phase=self.current)
        self.say(f"iteration {self.iteration} {stage}, {len(self._storages.builder.operators):,} operators")

    @contextlib.contextmanager
    def stage_of(self, name: str) -> Iterator[None]:
        """A context that is a stage of its own (``save``, ``load``), beside those of an iteration."""
        before = self._aside
        self.step_aside(name)
        try:
            yield
        finally:
            if before:
                self.step_aside(before)
            elif self._aside:
                self.enter(self.stage)

    def note_pass(self) -> None:
        """An outermost module is called."""
        self.forward_passes += 1
        if self._aside in ("generate", "evaluate"):
            self.passes_aside.append(len(self._storages.builder.rows))

    def step_aside(self, name: str) -> None:
        """Leave the training step, for ``evaluate``, ``generate``, ``save`` or ``load``."""
        if not self.names_stages or self._aside == name:
            return
        self._aside = name
        if name == "generate":
            self.begin_generation()
        self._storages.born_as = Category.ACTIVATION
        self.current = self._storages.builder.phase(self.iteration, name)
        self._storages.operator = self._storages.builder.operator(f"({name})", phase=self.current)

    @property
    def is_aside(self) -> bool:
        """True outside of any training step."""
        return bool(self._aside)

    def begin_backward(self) -> None:
        """A backward pass begins. Without any module, no call has begun the iteration yet."""
        self.backward_passes += 1
        if self.stage == "build" or (self.stage == "optimizer" and not self.in_optimizer_step):
            self.begin_iteration()
        if self.stage == "forward" or self._aside:
            self.enter("backward")
