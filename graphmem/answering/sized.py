"""One question at many sizes: captured at a few of them, and by template at the others.

A capture takes a second, a template (:mod:`graphmem.capture.templates`) some hundredths. It serves once it is proven: a
capture more than were needed to make it agrees with it, event by event and byte by byte.

Templates are no data, as rules of kernels are functions; so of a search what it was answered is kept on the disk, and
the same search has its answers there. Where it asks for more, its captures are made once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmem.answering import capture_cache
from graphmem.answering.capture_cache import SizeAnswer
from graphmem.answering.deep import has_many_layers, run_of_layers, with_layers
from graphmem.answering.question import Question, capture_key
from graphmem.answering.runs import (
    Progress,
    RunCache,
    asked_cudnn,
    labelled,
    limit_of,
    load,
    prepared,
    record,
    silent,
)
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
#: What the notes of a run that a template wrote begin with.
BY_TEMPLATE = "by template of the captures"
#: The sizes that a template can be a function of.
SIZES = ("batch", "seq_len")
#: A proven template serves sizes up to the largest captured one, and so much more: further on a step may take another
#: way.
_FURTHEST = 9 / 8
#: Lengths of sequences that a template serves are multiples of it: attention pads its log-sum-exp to 32 rows
#: (``_scaled_dot_product_efficient_attention``, torch/_meta_registrations.py), and masks to multiples of 8.
_BLOCK = 32
#: A template that so many captures have not proven is given up.
_MOST_CAPTURES = 6
#: So many of the smallest sizes may go another way than the others.
_MOST_ODD = 2
#: Events of a trace that takes hardly any time to write.
_SHORT = 2000
#: So many traces are written at a time: more take more memory, and hardly less time.
_TOGETHER = 64


class SizedRuns:
    """The runs of a question at several sizes, each put into ``cache``; ``question(size)`` asks for the size ``name``.

    ``is_proven``: whether a template is. ``refused``: why there is none; "" as long as there may be one. ``like``: the
    runs of the same question on another card, whose template serves where it gives a capture on this one. ``keeps``:
    the name under which answers are kept on the disk, if captures are: those of all sizes, so there should be few.
    """

    def __init__(
        self,
        name: str,
        question: Callable[[int], Question],
        cache: RunCache,
        like: SizedRuns | None = None,
        *,
        keeps: str = "",
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
        self._output_bytes: dict[int, int] = {}  # at the sizes that the template was learned at
        self._learned = ""
        self._above = 1  # sizes up to this one go another way
        self.is_proven = False
        self.refused = ""
        self._history: tuple[int, ...] = ()  # sizes that were captured, or recalled, in this order
        self._made = set[int]()  # those of them that this process has captured
        self._kept = _Kept(f"{name}, {keeps}") if keeps else None

    def __enter__(self) -> SizedRuns:
        self._opened.enter_context(garbage.looking_after(garbage.MANY))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        if self._kept is not None and (kind is None or issubclass(kind, Exception)):
            self._kept.write()

    def serves(self, size: int) -> bool:
        """Whether a template may serve a size: dimensions of one element are like no others, kernels of attention look
        at lengths of sequences in blocks, and the smallest sizes may go another way."""
        return size > self._above and size % self.block == 0

    @property
    def captured(self) -> list[int]:
        """The sizes that were captured for the template, in order."""
        return sorted(self._output_bytes)

    @property
    def is_own(self) -> bool:
        """Whether the template is of captures that were made here, not on another card."""
        return self.is_proven and len(self._samples) > 1

    @property
    def is_short(self) -> bool:
        """Whether traces are so short that several are written in the time of one."""
        return bool(self._runs) and all(len(run.trace) < _SHORT for run in self._runs.values())

    @property
    def may_learn(self) -> bool:
        """Whether another capture may prove a template."""
        return not (self.is_proven or self.refused) and len(self._made) < _MOST_CAPTURES

    def capture(self, size: int, say: Progress) -> Run:
        """The run of a capture, from which the template learns; it is in the cache for estimates of this size. Raises
        :class:`GraphmemError`."""
        question = self._question(size)
        if self.refused or not _is_captured(question):
            self.refused = self.refused or "the step is not captured at sizes of its own"
            return self._cache.run(question, say)
        answer = self._recalled("capture", size, question)
        run = None if answer is None else answer.run
        if run is None:
            self._catch_up(say)
            run = self._captured(size, question, say)
            self._note("capture", size, run)
        self._history += (size,)
        return run

    def _captured(self, size: int, question: Question, say: Progress) -> Run:
        with prepared(question):
            from graphmem.capture.record.calls import CallLog
            from graphmem.capture.templates.template import Sample
        if self._written is not None and self._cache.last is self._written:
            self._cache.forget()  # what a template wrote, or the disk had, is no capture
        log = CallLog()
        self._made.add(size)
        run = self._cache.run(question, say, log)
        if log.builder is None:  # it was in the cache, or planned
            return run
        self._runs[size], self._samples[size] = run, Sample(size, run.trace, log)
        with prepared(question):
            if len(self._samples) == 1 and self._like is not None and self._is_as_on_other_card(size, question):
                return run
            self._output_bytes = {one: made.output_bytes for one, made in self._runs.items()}
            self._learned = f"at {self.name} {', '.join(f'{one:,}' for one in self.captured)}"
            self._learn(question)
        return run

    # --- what the disk has ---

    def _recalled(self, way: str, size: int, question: Question) -> SizeAnswer | None:
        """The answer that was kept of the same search at the same point; what was known then is known again, and its
        run is in the cache."""
        answer = None if self._kept is None else self._kept.recalled(self._point(way, size), question)
        if answer is None:
            return None
        self.is_proven, self.refused, self._learned = answer.is_proven, answer.refused, answer.learned
        self._output_bytes, self._above = dict(answer.output_bytes), answer.above
        if answer.run is not None:
            self._cache.keep(question, answer.run)
            self._written = answer.run
        return answer

    def _note(self, way: str, size: int, run: Run | None) -> None:
        if self._kept is not None:
            run = run and capture_cache.answered_until_now(run)
            known = self.is_proven, self.refused, self._learned, self._above, tuple(self._output_bytes.items())
            self._kept.note(self._point(way, size), SizeAnswer(run, *known))

    def _point(self, way: str, size: int) -> str:
        return f"{way} {size} after {self._history}"

    def _catch_up(self, say: Progress) -> None:
        """Make the captures that the disk had, as the template is needed now."""
        for size in self._history:
            if size not in self._made:
                question = self._question(size)
                self._cache.forget()
                self._captured(size, question, say)

    # --- the template ---

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
            self._template, self.is_proven = None, False
            self._go_on_above(str(why))

    def _go_on_above(self, why: str) -> None:
        """Learn from larger sizes alone: at the smallest ones kernels are often chosen that are no other's choice."""
        if len(self._made) > _MOST_ODD + 1:
            self.refused = why
            return
        self._above = min(self._samples)
        del self._samples[self._above], self._runs[self._above], self._output_bytes[self._above]

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
        self._output_bytes, self.is_proven = like._output_bytes, True
        self._learned = f"{like._learned} on another card, which gave the one at {size:,} on this one"
        return True

    def expect(self, sizes: Iterable[int]) -> None:
        """Say which sizes will be asked of the template, in this order: many together take less time."""
        self._expected = tuple(sizes)

    def by_template(self, size: int) -> Run | None:
        """The run by the template, proven or not; it is in the cache for estimates of this size. None where there is no
        template, or it does not serve this size."""
        if len(self._output_bytes) < 2 or self.refused or not self._reaches(size):
            return None
        question = self._question(size)
        answer = self._recalled("template", size, question)
        if answer is not None:
            return answer.run
        self._catch_up(silent)
        with prepared(question):
            run = self._by_template(size, question)
        self._note("template", size, run)
        if run is not None:
            self._cache.keep(question, run)
            self._written = run
        return run

    def _by_template(self, size: int, question: Question) -> Run | None:
        from graphmem.capture.templates.layout import NoTemplate

        if self._template is None:
            return None
        try:
            trace = self._trace_at(size, question)
            output_bytes = self._output_bytes_at(size)
            sharded = _sharded_at(size, self._runs if self._like is None or self.is_own else self._like._runs)
        except (NoTemplate, ValueError):
            return None
        last = self._runs[max(self._runs)]
        notes = (*last.notes, f"{BY_TEMPLATE} {self._learned}")
        return replace(last, trace=trace, cudnn=self._cudnn, output_bytes=output_bytes, sharded=sharded, notes=notes)

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
            self._traces |= dict(zip(together, self._template.traces(together, card), strict=True))
        except (NoTemplate, ValueError):  # for one of them
            self._traces = dict(zip([size], self._template.traces([size], card), strict=True))
        return self._traces.pop(size)

    def _card(self, question: Question) -> Card:
        from graphmem.capture.kernels.parts.script import Card

        if self._cudnn is None:
            self._cudnn = self._opened.enter_context(asked_cudnn(question))
        setting = question.setting
        return Card(as_cuda(setting.device), setting.torch_version, cudnn=self._cudnn)

    def _output_bytes_at(self, size: int) -> int:
        from graphmem.capture.templates.curves import curve_through

        return curve_through(list(self._output_bytes), list(self._output_bytes.values())).at(size)


class _Kept:
    """The answers of one search on the disk, by the points of the search. It is found by the question at the size that
    is asked first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._place: Path | None = None
        self._model: object = None
        self._known: dict[str, SizeAnswer] | None = None  # None: not looked for yet
        self._used: dict[str, SizeAnswer] = {}
        self._is_new = False

    def recalled(self, point: str, question: Question) -> SizeAnswer | None:
        """The answer at a point of the search; None where there is none."""
        disk = capture_cache.in_use
        if disk is None:
            return None
        if self._known is None:
            self._model = question.model
            self._place = disk.place(
                question, capture_key(question), self._name, question.setting.device, limit_of(question)
            )
            self._known = (None if self._place is None else disk.recalled_sizes(self._place)) or {}
        found = self._known.get(point)
        if found is not None:
            self._used[point] = found
        return found

    def note(self, point: str, answer: SizeAnswer) -> None:
        """An answer that was made now."""
        if self._place is not None:
            self._used[point], self._is_new = answer, True

    def write(self) -> None:
        """Keep the answers of this search, if any is new: its captures have been made anew for that."""
        if self._place is not None and self._is_new and capture_cache.in_use is not None:
            capture_cache.in_use.keep_sizes(self._place, self._model, self._used)


class SizedRunsOfLayers(SizedRuns):
    """The same; of a deep model (:mod:`graphmem.answering.deep`) the runs with a few layers are captured, and have the
    templates of sizes, and its run is written from theirs. A capture of all layers takes as long as ten."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loaded: OnnxModel | TorchModel | None = None
        self._few: dict[int, SizedRuns] = {}  # by their number of layers

    @property
    def is_own(self) -> bool:
        """Whether the templates are of captures that were made here, not on another card."""
        return super().is_own or (self.is_proven and bool(self._few) and all(few.is_own for few in self._few.values()))

    def _captured(self, size: int, question: Question, say: Progress) -> Run:
        def captured(few: Question) -> Run:
            return self._with(few.layers or 0).capture(size, labelled(say, f"with {few.layers} of its layers"))

        if self._loaded is None:
            self._loaded = self._cache.model(question)
        if not has_many_layers(question, self._loaded):
            return super()._captured(size, question, say)
        self._made.add(size)
        run = run_of_layers(question, self._loaded, captured)
        if run is None:
            self.refused, self.is_proven = "its layers make no template", False
            return self._cache.run(question, say)
        self.refused = next((few.refused for few in self._few.values() if few.refused), "")
        self.is_proven = all(few.is_proven for few in self._few.values())
        if self.is_proven and not self.is_own and self._like is not None:
            self._output_bytes = self._like._output_bytes  # its sizes are served, by the templates of its few layers
        else:
            self._output_bytes[size] = run.output_bytes
        self._learned = f"at {self.name} {', '.join(f'{one:,}' for one in self.captured)}"
        self._cache.forget()
        self._cache.keep(question, run)
        return run

    def _by_template(self, size: int, question: Question) -> Run | None:
        def written(few: Question) -> Run:
            run = self._with(few.layers or 0).by_template(size)
            if run is None:
                raise GraphmemError("no template serves this size")
            return run

        if not self._few or self._loaded is None:
            return super()._by_template(size, question)
        return run_of_layers(question, self._loaded, written)

    def _with(self, layers: int) -> SizedRuns:
        """The runs with so many layers."""
        if layers not in self._few:
            question, like = self._question, self._like
            alike = like._few.get(layers) if isinstance(like, SizedRunsOfLayers) else None
            few = SizedRuns(self.name, lambda size: with_layers(question(size), layers), _Captures(), alike)
            self._few[layers] = self._opened.enter_context(few)
        return self._few[layers]


class _Captures(RunCache):
    """Captures that are part of another run: none is sought, or kept, on the disk."""

    def run(self, question: Question, say: Progress = silent, calls: CallLog | None = None) -> Run:
        with turn(), prepared(question):
            return record(question, load(question), say, calls)


def _sharded_at(size: int, runs: Mapping[int, Run]) -> Sharded | None:
    """How the model is shared out at a size, by runs at others. Raises ValueError."""
    from graphmem.capture.templates.curves import curve_through

    sharded = [run.sharded for run in runs.values() if run.sharded is not None]
    models = [one.transformer for one in sharded if one.transformer is not None]
    if not models:
        return sharded[-1] if sharded else None

    def at(values: Iterable[int]) -> int:
        return curve_through(list(runs), list(values)).at(size)

    model = replace(models[-1], batch=at(one.batch for one in models), seq_len=at(one.seq_len for one in models))
    return replace(sharded[-1], transformer=model)


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
    """Whether the step is captured as it is: an ONNX graph is planned, a JAX program compiled, and a generation may be
    shortened."""
    step = question.step
    generates = not isinstance(step, Training) and step.generate is not None
    return not question.is_onnx and not question.is_compiled and not generates
