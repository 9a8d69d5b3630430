"""The run of a deep model, written from captures of it with a few layers (:mod:`graphmem.capture.templates.depth`).

    run = run_of_layers(question, loaded, capture)  # None: it is captured whole

Three captures at least: two make the template, and a third one, event by event, proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from graphmem.answering.question import Question
from graphmem.errors import GraphmemError
from graphmem.replay import most_requested
from graphmem.run import SMALL_OUTPUT, Run
from graphmem.sources import OnnxModel, TorchModel
from graphmem.trace import Trace, same
from graphmem.training import Training

if TYPE_CHECKING:
    from graphmem.capture.templates.depth import DepthTemplate

#: Numbers of layers that are captured: the first three, and further ones while they make no template.
FEWEST, MOST = 4, 8
#: A model with fewer layers is captured as fast as that.
_WORTH_IT = 40


def run_of_layers(question: Question, loaded: OnnxModel | TorchModel, capture: Callable[[Question], Run]) -> Run | None:
    """The run of a training step of the ``loaded`` model by a template of its layers, of captures by ``capture``.

    None where there is none: the layers differ, or are few, or a template refuses the step, or it fails.
    """
    if not has_many_layers(question, loaded):
        return None
    try:
        return _by_template(question, _layers(question, loaded), capture)
    except GraphmemError:
        return None  # the step of all layers will say why


def has_many_layers(question: Question, loaded: OnnxModel | TorchModel) -> bool:
    """Whether the model of a training step is deep enough, and may have fewer layers."""
    return _layers(question, loaded) >= _WORTH_IT


def with_layers(question: Question, few: int) -> Question:
    """The question of the model with a few of its layers."""
    return replace(question, layers=few, iterations=_ITERATIONS)


def _by_template(question: Question, layers: int, capture: Callable[[Question], Run]) -> Run | None:
    from graphmem.capture.loop.step import MANY_OPERATORS
    from graphmem.capture.templates.layout import NoTemplate

    captured: dict[int, Run] = {}
    for few in range(FEWEST, MOST + 1):
        captured[few] = capture(with_layers(question, few))
        if few < FEWEST + 2:
            continue
        try:
            run = _Written([captured[number] for number in range(few - 2, few + 1)], few, layers).run()
        except NoTemplate:
            continue
        if _operators_of(run.trace, _ITERATIONS) <= MANY_OPERATORS:
            return None  # so small a step runs more often
        seen = ", ".join(str(number) for number in sorted(captured))
        note = f"by template of the captures with {seen} of its {layers} layers"
        other = run.other_loop and replace(run.other_loop, notes=(*run.other_loop.notes, note))
        return replace(run, notes=(*run.notes, note), other_loop=other)
    return None


#: Of a step of many operators (``_run_alike``, graphmem/capture/loop/step.py).
_ITERATIONS = 2


def _layers(question: Question, loaded: OnnxModel | TorchModel) -> int:
    """How many layers the model of a training step has; 0 where it cannot be built with fewer, or is to be."""
    step = question.step
    if not isinstance(loaded, TorchModel) or question.layers is not None:
        return 0
    if not isinstance(step, Training) or step.optimizer == "lbfgs" or step.epoch.varies or question.iterations:
        return 0
    # Buckets of DDP and DeepSpeed, and its limit of live parameters, are filled by more layers than are captured; the
    # compiler decides about the whole graph; and a stage's micro-batches take as long as all layers.
    if any(one is not None for one in (step.ddp, step.zero, step.pp)) or step.compile:
        return 0
    return loaded.layers or 0


def _operators_of(trace: Trace, iteration: int) -> int:
    own = {number for number, phase in enumerate(trace.phases) if phase.iteration == iteration}
    return sum(one.phase in own for one in trace.operators)


class _Written:
    """The run of ``layers`` layers from three runs, the deepest of which has ``few``."""

    def __init__(self, runs: Sequence[Run], few: int, layers: int) -> None:
        self._runs, self._few, self._layers = runs, few, layers

    def run(self) -> Run:
        """The run, with that of the other loop where its figures may be asked. Raises :class:`NoTemplate`."""
        run: Run = self._extended("run", [replace(one, other_loop=None) for one in self._runs])
        if run.output_bytes < SMALL_OUTPUT * most_requested(run.trace):
            return run
        return replace(run, other_loop=self._extended("other loop", [one.other_loop for one in self._runs]))

    def _extended(self, name: str, values: Sequence[Any]) -> Any:
        """A value at ``layers`` that was these with one layer after the other: as it was, or growing with each."""
        from graphmem.capture.templates.layout import NoTemplate

        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise NoTemplate(f"its {name} is of another kind with another layer")
        if isinstance(first, Trace):
            return self._trace(values)
        if isinstance(first, Run) or (is_dataclass(first) and not isinstance(first, type) and not _alike(values)):
            parts = {one.name: [getattr(value, one.name) for value in values] for one in fields(first)}
            return replace(first, **{part: self._extended(part, column) for part, column in parts.items()})
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            return {key: self._extended(name, [value[key] for value in values]) for key in first}
        if type(first) is int and values[2] - values[1] == values[1] - first:
            return values[2] + (self._layers - self._few) * (values[1] - first)
        if not _alike(values):
            raise NoTemplate(f"its {name} differs with another layer")
        return first

    def _trace(self, traces: Sequence[Trace]) -> Trace:
        from graphmem.capture.templates.depth import DepthTemplate
        from graphmem.capture.templates.layout import NoTemplate

        template: DepthTemplate = DepthTemplate.learn((self._few - 1, traces[1]), (self._few, traces[2]))
        if not same(template.at(self._few - 2), traces[0]):
            raise NoTemplate("a capture with fewer layers is another")
        return template.at(self._layers)


def _alike(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)
