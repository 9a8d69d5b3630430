"""One question at many sizes: captured at a few of them, and by template at the others.

A capture takes a second, a template (:mod:`graphmem.capture.templates`) some hundredths. It serves once it is proven: a
capture more than were needed to make it agrees with it, event by event and byte by byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from graphmem.answering.deep import has_many_layers, run_of_layers, with_layers
from graphmem.answering.question import Question
from graphmem.answering.runs import Progress, RunCache, asked_cudnn, labelled, load, record, silent
from graphmem.answering.waiting import let_wait
from graphmem.base import garbage
from graphmem.capture.threads import turn
from graphmem.devices import as_cuda
from graphmem.errors import GraphmemError
from graphmem.run import Run
from graphmem.sources import OnnxModel, TorchModel
from graphmem.trace import Trace
from graphmem.training import Training

if TYPE_CHECKING:
    from graphmem.base.textbook import Sharded
    from graphmem.capture.kernels.parts.script import Card
    from graphmem.capture.record.calls import CallLog
    from graphmem.capture.templates.template import Sample, Template
    from graphmem.cudnn.library import Cudnn

#: Fields of a run that may differ from size to size.
_OF_A_SIZE = {"trace", "output_bytes", "cudnn", "sharded"}
#: The sizes that a template can be a function of.
SIZES = ("batch", "seq_len")
#: A proven template serves sizes up to the largest captured one, and so much more: further on a step may take another
#: way.
_FURTHEST = 9 / 8
#: Lengths of sequences that a template serves are multiples of it: attention pads its log-sum-exp to 32 rows
#: (``_scaled_dot_product_efficient_attention``, torch/_meta_registrations.py), and masks to multiples of 8.
_BLOCK = 32
#: So many traces are written at a time: more take more memory, and hardly less time.
_TOGETHER = 32


class SizedRuns:
    """The runs of a question at several sizes, each put into ``cache``; ``question(size)`` asks for the size ``name``.

    ``is_proven``: whether a template is. ``refused``: why there is none; "" as long as there may be one. ``like``: the
    runs of the same question on another card, whose template serves where it gives a capture on this one.
    """

    def __init__(
        self, name: str, question: Callable[[int], Question], cache: RunCache, like: SizedRuns | None = None
    ) -> None:
        self.name, self._question, self._cache, self._like = name, question, cache, like
        self.block = _BLOCK if name == "seq_len" else 1
        self._runs: dict[int, Run] = {}  # that were captured, by size
        self._samples: dict[int, Sample] = {}
        self._template: Template | None = None
        self._written: Run | None = None  # the last one by template
        self._expected: tuple[int, ...] = ()  # sizes that will be asked
        self._traces: dict[int, Trace] = {}  # of expected sizes, by template
        self._opened = contextlib.ExitStack()
        self._cudnn: Cudnn | None = None  # asked at all sizes
        self._learned_at: dict[int, Run] = {}  # the runs that the template was learned of, by size
        self._learned = ""
        self.is_proven = False
        self.refused = ""

    def __enter__(self) -> SizedRuns:
        self._opened.enter_context(garbage.looking_after(garbage.MANY))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def serves(self, size: int) -> bool:
        """Whether a template may serve a size: dimensions of one element are like no others, and kernels of attention
        look at lengths of sequences in blocks."""
        return size > 1 and size % self.block == 0

    @property
    def captured(self) -> list[int]:
        """The sizes that were captured for the template, in order."""
        return sorted(self._learned_at)

    def capture(self, size: int, say: Progress) -> Run:
        """The run of a capture, from which the template learns; it is in the cache for estimates of this size. Raises
        :class:`GraphmemError`."""
        question = self._question(size)
        if self.refused or not _is_captured(question):
            self.refused = self.refused or "the step is not captured at sizes of its own"
            return self._cache.run(question, say)
        from graphmem.capture.record.calls import CallLog
        from graphmem.capture.templates.template import Sample

        if self._cache.last is self._written:
            self._cache.forget()  # what a template wrote is no capture
        log = CallLog()
        run = self._cache.run(question, say, log)
        if log.builder is None:  # it was in the cache, or planned
            return run
        self._runs[size], self._samples[size] = run, Sample(size, run.trace, log)
        if len(self._samples) == 1 and self._like is not None and self._is_as_on_other_card(size, question):
            return run
        self._learned_at = dict(self._runs)
        self._learned = f"at {self.name} {', '.join(f'{one:,}' for one in self.captured)}"
        self._learn(question)
        return run

    def _learn(self, question: Question) -> None:
        """Make the template of all captures, and see whether it is proven."""
        from graphmem.capture.templates.layout import NoTemplate
        from graphmem.capture.templates.template import Template

        if len(self._samples) < 2:
            return
        first, *others = self._runs.values()
        if first.planned is not None or first.is_own_step:
            self.refused = "the program runs its steps itself"
            return
        if not all(_are_alike(first, other) for other in others):
            self.refused = "what is known of the runs differs from size to size"
            return
        self._traces = {}
        try:
            self._template = Template.learn(list(self._samples.values()))
            self.is_proven = self._template.is_proven and self._template.agrees(self._card(question))
        except (NoTemplate, ValueError) as why:
            self.refused, self.is_proven = str(why), False

    def _is_as_on_other_card(self, size: int, question: Question) -> bool:
        """Whether the template of another card, asked about this one, gives the first capture made here; it is this
        one's then."""
        from graphmem.capture.templates.layout import NoTemplate

        like = self._like
        if like is None or like._template is None or not like.is_proven or size not in like._runs:
            return False
        if not _are_alike(replace(self._runs[size], limit=like._runs[size].limit), like._runs[size]):
            return False
        try:
            self._template = like._template.on_other_card(self._samples[size], self._card(question))
        except (NoTemplate, ValueError):
            return False
        self._learned_at, self.is_proven = like._learned_at, True
        self._learned = f"{like._learned} on another card, which gave the one at {size:,} on this one"
        return True

    def expect(self, sizes: Iterable[int]) -> None:
        """Say which sizes will be asked of the template, in this order: many together take less time."""
        self._expected = tuple(sizes)

    def by_template(self, size: int) -> Run | None:
        """The run by the template, proven or not; it is in the cache for estimates of this size. None where there is no
        template, or it does not serve this size."""
        from graphmem.capture.templates.layout import NoTemplate

        if self._template is None or self.refused or not self._reaches(size):
            return None
        question = self._question(size)
        try:
            trace = self._trace_at(size, question)
            of_size = _values_at(size, self._learned_at)
        except (NoTemplate, ValueError):
            return None
        last = self._runs[max(self._runs)]
        notes = (*last.notes, f"by template of the captures {self._learned}")
        run = replace(last, trace=trace, cudnn=self._cudnn, notes=notes, **of_size)
        self._cache.keep(question, run)
        self._written = run
        return run

    def _reaches(self, size: int) -> bool:
        return self.serves(size) and not (self.is_proven and size > _FURTHEST * self.captured[-1])

    def _trace_at(self, size: int, question: Question) -> Trace:
        """The trace by the template, which writes some of those that will be asked next too. Raises
        :class:`NoTemplate`, and ValueError for a curve that has no whole number here."""
        from graphmem.capture.templates.layout import NoTemplate

        assert self._template is not None
        made = self._traces.pop(size, None)
        if made is not None:
            return made
        place = self._expected.index(size) if size in self._expected else len(self._expected)
        together = [one for one in self._expected[place : place + _TOGETHER] if self._reaches(one)] or [size]
        card = self._card(question)
        try:
            self._traces = dict(zip(together, self._template.traces(together, card), strict=True))
        except (NoTemplate, ValueError):  # for one of them
            self._traces = dict(zip([size], self._template.traces([size], card), strict=True))
        return self._traces.pop(size)

    def _card(self, question: Question) -> Card:
        from graphmem.capture.kernels.parts.script import Card

        if self._cudnn is None:
            self._cudnn = self._opened.enter_context(asked_cudnn(question))
        setting = question.setting
        return Card(as_cuda(setting.device), setting.torch_version, cudnn=self._cudnn)


class DeepSizedRuns(SizedRuns):
    """The same of a deep model (:mod:`graphmem.answering.deep`), whose run is written from those with a few layers at
    every size: these are captured, and have the templates of sizes. A capture of all layers takes as long as ten."""

    def __init__(
        self, name: str, question: Callable[[int], Question], cache: RunCache, loaded: OnnxModel | TorchModel
    ) -> None:
        super().__init__(name, question, cache)
        self._loaded = loaded
        self._few: dict[int, SizedRuns] = {}  # by their number of layers
        self._captured: set[int] = set()

    @property
    def captured(self) -> list[int]:
        return sorted(self._captured)

    def capture(self, size: int, say: Progress) -> Run:
        question = self._question(size)

        def captured(few: Question) -> Run:
            return self._with(few.layers or 0).capture(size, labelled(say, f"with {few.layers} of its layers"))

        with turn():
            run = None if self.refused else run_of_layers(question, self._loaded, captured)
        if run is None:
            self.refused, self.is_proven = self.refused or "its layers make no template", False
            return self._cache.run(question, say)
        self._captured.add(size)
        self.refused = next((few.refused for few in self._few.values() if few.refused), "")
        self.is_proven = all(few.is_proven for few in self._few.values())
        return self._kept(question, run)

    def by_template(self, size: int) -> Run | None:
        if self.refused or not self._reaches(size):
            return None
        question = self._question(size)

        def written(few: Question) -> Run:
            run = self._with(few.layers or 0).by_template(size)
            if run is None:
                raise GraphmemError("no template serves this size")
            return run

        run = run_of_layers(question, self._loaded, written)
        return None if run is None else self._kept(question, run)

    def _with(self, layers: int) -> SizedRuns:
        """The runs with so many layers."""
        if layers not in self._few:
            question = self._question
            few = SizedRuns(self.name, lambda size: with_layers(question(size), layers), _Captures())
            self._few[layers] = self._opened.enter_context(few)
        return self._few[layers]

    def _kept(self, question: Question, run: Run) -> Run:
        self._cache.forget()
        self._cache.keep(question, run)
        return run


class _Captures(RunCache):
    """Captures that are part of another run: none is sought, or kept, on the disk."""

    def run(self, question: Question, say: Progress = silent, calls: CallLog | None = None) -> Run:
        return record(question, load(question), say, calls)


def sized_runs(name: str, question: Callable[[int], Question], cache: RunCache) -> SizedRuns:
    """The runs of a question at a few sizes; see :class:`SizedRuns`."""
    if name in SIZES:
        with contextlib.suppress(GraphmemError), turn():  # the search will say why
            first = question(_BLOCK)
            let_wait(first)
            loaded = load(first)
            if has_many_layers(first, loaded):
                return DeepSizedRuns(name, question, cache, loaded)
    return SizedRuns(name, question, cache)


def _values_at(size: int, runs: Mapping[int, Run]) -> dict[str, Any]:
    """The fields of a run, but for its trace, that follow from its size, by those of ``runs``. Raises ValueError."""
    from graphmem.capture.templates.curves import curve_through

    def at(values: Iterable[int]) -> int:
        return curve_through(list(runs), list(values)).at(size)

    found: dict[str, Any] = {"output_bytes": at(run.output_bytes for run in runs.values())}
    sharded = [run.sharded for run in runs.values() if run.sharded is not None]
    models = [one.transformer for one in sharded if one.transformer is not None]
    if models:
        model = replace(models[-1], batch=at(one.batch for one in models), seq_len=at(one.seq_len for one in models))
        found["sharded"] = replace(sharded[-1], transformer=model)
    return found


def _are_alike(one: Run, other: Run) -> bool:
    """Whether all is the same that is known of two runs, but for what a size changes."""
    names = (known.name for known in fields(Run) if known.name not in _OF_A_SIZE)
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return False
    return _without_sizes(one.sharded) == _without_sizes(other.sharded)


def _without_sizes(sharded: Sharded | None) -> Sharded | None:
    """How a model is shared out, whatever a step takes."""
    if sharded is None or sharded.transformer is None:
        return sharded
    return replace(sharded, transformer=replace(sharded.transformer, batch=0, seq_len=0))


def _is_captured(question: Question) -> bool:
    """Whether the step is captured as it is: an ONNX graph is planned, and a generation may be shortened."""
    step = question.step
    generates = not isinstance(step, Training) and step.generate is not None
    return not question.is_onnx and not generates
