"""What is loaded and recorded for a question, and kept for the next one that it serves."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from graphmem import sandbox, sources
from graphmem.capture.threads import current_threads, turn
from graphmem.cudnn.library import Cudnn
from graphmem.devices import as_cuda
from graphmem.errors import CannotShortenError, GraphmemError, ProgramOutOfMemory, SourceError, UsageError
from graphmem.files import without_compiler_folder
from graphmem.question import Question, capture_key
from graphmem.runtimes.base import Taken
from graphmem.sources import OnnxModel, Sizes, TorchModel
from graphmem.sources.base import Built
from graphmem.textbook import ModelShape
from graphmem.trace import Place, Trace
from graphmem.training import DTYPES, Inference, Training, other_loop
from graphmem.versions import installed_version

if TYPE_CHECKING:
    from graphmem.capture.session.run import CapturedModel
    from graphmem.capture.values.messages import Message, Messages, Post
    from graphmem.sources.onnx_file import OnnxFile

Made = TypeVar("Made")
#: Who is told how far it is.
Say = Callable[[str], None]

_OWN_STEP = "custom step function"
#: Frameworks of models whose inputs were bound when they were read.
_OF_ONE_SIZE = ("ONNX", "Keras")


def within(say: Say, what: str) -> Say:
    """Tells how far a part of something longer is: ``what`` stands before it."""
    return lambda stage: say(f"{what}: {stage}")


def unheard(_: str) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Recorded:
    """What a capture, or a plan, gives; it serves every question of its key.

    ``words`` describe the step. ``card_told`` is what the step's own code asked the card about itself, and was told.
    ``within`` is the card that it ran within the memory of, where it could be refused some: :func:`limit_of`.
    ``other_loop``: what the same capture gives for the other of :data:`graphmem.training.LOOPS`, if it tells.
    """

    made: CapturedModel | Taken
    words: str
    notes: tuple[str, ...] = ()
    card_told: Mapping[str, Any] = field(default_factory=dict)
    within: Hashable = None
    other_loop: Recorded | None = None

    def could_go_on(self, question: Question) -> bool:
        """Whether this is a program that has not run within the card of ``question``: where memory ends there, it may
        catch the error."""
        whole_program = not isinstance(self.made, Taken) and self.made.custom_step
        return whole_program and limit_of(question) is not None and self.within != limit_of(question)


class Captures:
    """What was captured last for one model, kept for the next question: one with an equal :class:`CaptureKey` takes it.

    A step's own code may ask the card for its name or its memory, or be refused some; what such a step gave serves only
    cards that would have said the same. One capture is kept at a time, so questions are best asked key by key.
    """

    def __init__(self) -> None:
        self._files: dict[Any, OnnxFile] = {}
        self._models, self._records = _Slot(), _Slot()

    def loaded(self, question: Question) -> OnnxModel | TorchModel:
        """The model of a question. An ONNX file is read once; a factory is made anew for every capture, as its code may
        keep a state."""
        recorded: Recorded | None = self._records.made
        if recorded is not None and any(_says(question, fact) != told for fact, told in recorded.card_told.items()):
            self.forget()
        if self._told_beside(question) is not None:
            model: TorchModel = self._models.made
            return model
        key = capture_key(question)
        return self._models.get(key.loading if question.is_onnx else key, lambda: load(question, self._files))

    def forget(self) -> None:
        """Let the next question load and record anew."""
        self._models.clear()
        self._records.clear()

    @property
    def trace(self) -> Trace:
        """What was recorded last."""
        recorded: Recorded = self._records.made
        return recorded.made.trace

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the process groups that the last recorded step was in."""
        recorded: Recorded = self._records.made
        return () if isinstance(recorded.made, Taken) else recorded.made.groups

    def recorded(self, question: Question, loaded: OnnxModel | TorchModel, say: Say = unheard) -> Recorded:
        """The capture or the plan for a question, whose model :meth:`loaded` gave; ``say`` is told how far it is."""
        return self._told_beside(question) or self._records.get(
            capture_key(question), lambda: record(question, loaded, say)
        )

    def _told_beside(self, question: Question) -> Recorded | None:
        """What the last capture, which was for the other loop, gives for this one; None where it was for others."""
        recorded: Recorded | None = self._records.made
        if recorded is None or recorded.other_loop is None or not isinstance(question.step, Training):
            return None
        other = replace(question, training=replace(question.step, loop=other_loop(question.step.loop)))
        return recorded.other_loop if self._records.is_for(capture_key(other)) else None


class _Slot:
    """The last of what was made, or why it could not be, with what it was made for."""

    def __init__(self) -> None:
        self._key: object = None
        self._made: Any = None
        self._error: GraphmemError | None = None

    @property
    def made(self) -> Any:
        """What it holds; None for nothing, and for what could not be made."""
        return self._made

    def is_for(self, key: object) -> bool:
        """Whether it holds what was made for an equal key."""
        return self._key is not None and self._key == key

    def clear(self) -> None:
        """Hold nothing."""
        self._key = self._made = self._error = None

    def get(self, key: object, make: Callable[[], Made]) -> Made:
        """What was made for an equal ``key``, else what ``make`` makes now; errors too are kept."""
        if not self.is_for(key):
            self.clear()  # before the next is made
            try:
                self._made = make()
            except GraphmemError as error:
                self._error = error
            self._key = key
        if self._error is not None:
            raise self._error.with_traceback(None)
        made: Made = self._made
        return made


# --- loading ----------------------------------------------------------------------------------------------------------


@without_compiler_folder()
def load(question: Question, files: dict[Any, OnnxFile] | None = None) -> OnnxModel | TorchModel:
    """The model, with every dimension of an ONNX file bound; ``files`` keeps ONNX files that were read."""
    return sources.load(
        question.model,
        question.example_inputs,
        asked=question.asked,
        shapes=question.shapes,
        optimization=question.optimization,
        files=files,
        trust=question.trust,
    )


# --- recording --------------------------------------------------------------------------------------------------------


@without_compiler_folder()
def record(question: Question, loaded: OnnxModel | TorchModel, say: Say = unheard) -> Recorded:
    """Plan the graph, or capture the step. Raises :class:`GraphmemError`."""
    if question.sizes.weights is not None and not (isinstance(loaded, TorchModel) and loaded.quantizes):
        raise UsageError(
            f"{loaded.name}: quantised weights are those of transformers' models (hf:...); quantise the model in a "
            "program of your own, and drop weights"
        )
    if question.sizes.attention_mask is not None and not (isinstance(loaded, TorchModel) and loaded.masks):
        raise UsageError(
            f"{loaded.name}: attention_mask is made for transformers' models (hf:...); make the mask where the other "
            "inputs are made, and leave attention_mask out"
        )
    if isinstance(loaded, OnnxModel):
        if question.planner is None:
            from graphmem.sources.onnx_training import as_torch_model

            return _record_step(question, as_torch_model(loaded), say)
        options = question.planner.parse(question.alloc_conf, question.setting)
        return Recorded(question.planner.plan(loaded.sessions, options, question.iterations), "inference")
    if loaded.framework == "Keras" and (question.step.dtype != "fp32" or question.step.amp):
        raise UsageError(f"{loaded.name}: set the precision with keras.config.set_dtype_policy; drop --dtype and --amp")
    return _planned(question, loaded) or _record_step(question, loaded, say)


def _planned(question: Question, loaded: TorchModel) -> Recorded | None:
    """What the model's own runtime tells of the step; None where that is asked for otherwise, or tells nothing."""
    if loaded.planned is None or question.runtime_by_default(loaded.runtime).name != loaded.runtime:
        return None
    card = question.setting.device
    sizes = replace(question.sizes, training=isinstance(question.step, Training), iterations=question.iterations)
    with contextlib.ExitStack() as stack:
        cudnn = stack.enter_context(Cudnn(question.cudnn, card)) if question.cudnn_library is not None else None
        taken = loaded.planned(sizes, card, cudnn)
        told = cudnn.notes() if cudnn is not None and taken is not None else []
    if taken is None:
        return None
    words = loaded.step_words if sizes.training else "inference"
    return Recorded(replace(taken, assumptions=(*taken.assumptions, *told)), words)


def _record_step(question: Question, loaded: TorchModel, say: Say) -> Recorded:
    captured, told, built, left = _capture_within(loaded, question, say)
    ending = captured.ending
    if captured.custom_step and not any(s.place == Place.DEVICE for s in captured.trace.storages):
        if ending is not None:
            raise SourceError(f"{loaded.name}: {ending.words()}, and put nothing on the GPU")
        raise SourceError(
            f"{loaded.name} returned nothing and put nothing on the GPU; let it return (model, inputs), or run the "
            "whole step itself on the device 'cuda'"
        )
    step = question.step
    words = step.describe(built.weights(step)) if not captured.custom_step else loaded.step_words or _OWN_STEP
    if ending is not None:
        launcher = loaded.program.launcher if loaded.program is not None else ""
        words = f"whole program, {ending.steps} optimizer steps{launcher and ', '}{launcher}"
    if captured.custom_step and isinstance(step, Training) and step.processes is not None:
        words += f", {step.processes.describe()}"
    recorded = Recorded(captured, words, (*loaded.notes, *left), told, limit_of(question))
    other = captured.other_loop
    if other is None or not isinstance(step, Training):
        return recorded
    theirs = replace(step, loop=other_loop(step.loop))
    return replace(recorded, other_loop=replace(recorded, made=other, words=theirs.describe(built.weights(step))))


def _capture_within(
    loaded: TorchModel, question: Question, say: Say
) -> tuple[CapturedModel, dict[str, Any], _BuiltWith, tuple[str, ...]]:
    """The captured step within the memory of the card that was named: with what it was told, how it was built, and
    remarks. A program that ends when it is refused memory runs once more without a limit, to tell how much it needs."""
    left: tuple[str, ...] = ()
    if limit_of(question) is not None:
        built = _BuiltWith(loaded.build)
        try:
            return *_capture(replace(loaded, build=built), question, limited=True, say=say), built, ()
        except ProgramOutOfMemory as error:
            left = (f"out of memory, which ends the program: {error}; the figures are of a run without a limit",)
        again = loaded if question.is_onnx else load(question)  # its code may keep a state
        assert isinstance(again, TorchModel)
        loaded = again
    built = _BuiltWith(loaded.build)
    return *_capture(replace(loaded, build=built), question, say=say), built, left


def _capture(
    loaded: TorchModel, question: Question, *, record_graph: bool = False, limited: bool = False, say: Say = unheard
) -> tuple[CapturedModel, dict[str, Any]]:
    """The captured step, and what its code was told of the card."""
    installed_version()  # one that is too old is refused before it is imported
    from graphmem.capture.session.run import capture_model

    card = question.setting.device
    told: set[str] = set()
    runtime = question.runtime_by_default(loaded.runtime)
    options = runtime.parse(question.alloc_conf, question.setting)
    with contextlib.ExitStack() as stack:
        cudnn = stack.enter_context(Cudnn(question.cudnn, card)) if question.cudnn_library is not None else None

        def capture(shortens: bool, leaves_alike: bool = True, tells_both: bool = True) -> CapturedModel:
            return _heard(question, loaded, partial(capture_one, shortens, leaves_alike, tells_both))

        def capture_one(
            shortens: bool, leaves_alike: bool, tells_both: bool,
            loaded: TorchModel, step: Training | Inference, post: Post | None,
        ) -> CapturedModel:  # fmt: skip
            if loaded.program is None:
                return capture_in_view(shortens, leaves_alike, tells_both, loaded, step, post)
            with sandbox.attempt(lambda: current_threads() is not None) as happened:
                made = capture_in_view(shortens, leaves_alike, tells_both, loaded, step, post)
            return replace(made, sandbox=happened)

        def capture_in_view(
            shortens: bool, leaves_alike: bool, tells_both: bool,
            loaded: TorchModel, step: Training | Inference, post: Post | None,
        ) -> CapturedModel:  # fmt: skip
            return capture_model(
                loaded.build,
                question.sizes,
                step,
                name=loaded.name,
                device=as_cuda(card),
                told=told,
                torch_version=question.setting.torch_version,
                iterations=question.iterations,
                build_on=question.build_on,
                record_graph=record_graph,
                cudnn=cudnn,
                program=loaded.program,
                memory=runtime.live(options, question.setting, limited=limited),
                own_settings=question.alloc_conf is None,
                shortens=shortens,
                leaves_alike=leaves_alike,
                tells_both=tells_both and loaded.framework != "Keras",
                post=post,
                say=say,
            )

        try:
            captured = capture(shortens=loaded.program is not None or question.sizes.generate is not None)
        except CannotShortenError:  # a long generation was not what it seemed: every token is followed
            captured = capture(shortens=False)
        if captured.wants_every_iteration:
            captured = capture(shortens=False, leaves_alike=False)
        if captured.wants_own_loop:
            captured = capture(shortens=False, tells_both=False)
    if captured.refusals:
        told.add("allocator")
    return captured, {fact: _says(question, fact) for fact in sorted(told)}


_RunAs = Callable[["TorchModel", "Training | Inference", "Post | None"], "CapturedModel"]


def _heard(question: Question, loaded: TorchModel, run: _RunAs) -> CapturedModel:
    """The captured step of a process, which was told what other processes of the job say. Those are run as far as they
    say it; where they wait for each other, or fail, it is not known."""
    from graphmem.capture.values.messages import Messages, Post, Unheard

    step = _step_for(question, loaded)
    processes = step.processes if isinstance(step, Training) else None
    is_agreed = isinstance(step, Training) and step.pp is not None  # what stages made here say is known
    if processes is None or processes.world_size == 1 or is_agreed:
        return run(loaded, step, None)
    messages = Messages()
    while True:
        try:
            return run(loaded, step, Post(processes.rank, messages))
        except Unheard as missing:
            _ask(missing.message, question, run, messages)
        loaded = _anew(question, loaded)


def _ask(
    message: Message, question: Question, run: _RunAs, messages: Messages, asking: tuple[Message, ...] = ()
) -> None:
    """Have the message said, or lost."""
    from graphmem.capture.values.messages import Post, Said, Unheard

    while message not in messages.said and message not in messages.lost:
        loaded = load(question)
        assert isinstance(loaded, TorchModel)
        step = _step_for(question, loaded)
        assert isinstance(step, Training)
        try:
            run(loaded, replace(step, rank=message.source), Post(message.source, messages, message))
            messages.lost.add(message)  # it ended without
        except Said:
            return
        except Unheard as missing:
            if missing.message in (message, *asking):
                messages.lost.add(missing.message)
            else:
                _ask(missing.message, question, run, messages, (*asking, message))
        except GraphmemError:
            messages.lost.add(message)


def _anew(question: Question, loaded: TorchModel) -> TorchModel:
    """The model loaded once more, as its code may keep a state."""
    again = load(question)
    assert isinstance(again, TorchModel)
    if isinstance(loaded.build, _BuiltWith):
        loaded.build.build_with(again.build)
        again = replace(again, build=loaded.build)
    return again


def _step_for(question: Question, loaded: TorchModel) -> Training | Inference:
    """The step as it is run. Keras' own ``train_step`` returns what it needs of a step, and no output outlives it."""
    step = question.step
    if not isinstance(step, Training):
        return step
    if step.epoch.varies and loaded.framework in _OF_ONE_SIZE:
        raise UsageError(f"{loaded.name}: its inputs have one size; leave out seq_lens, last_batch and eval_batches")
    return replace(step, loop="drop") if loaded.framework == "Keras" else step


def limit_of(question: Question) -> Hashable:
    """What decides when memory runs out on the card that was named; None where none was."""
    if question.device is None:
        return None
    card, configuration = (
        question.setting.device,
        (question.runtime, question.alloc_conf, question.setting.torch_version),
    )
    return card.capacity_bytes, card.taken_bytes, configuration


def _says(question: Question, fact: str) -> Any:
    """What a step's own code is told: by the card, and by the allocator, for which the whole of its options stands."""
    card = question.setting.device
    if fact == "allocator":
        return limit_of(question) or (question.runtime, question.alloc_conf)
    facts = {
        "name": card.name,
        "total_bytes": card.capacity_bytes,
        "free_bytes": card.capacity_bytes - card.taken_bytes,
        "l2_cache_bytes": card.l2_cache_bytes,
    }
    return facts[fact]


def shape_of(question: Question) -> ModelShape:
    """What the model of a question is made of. Raises :class:`GraphmemError`."""
    installed_version()
    with turn():
        loaded = load(question)
        if isinstance(loaded, OnnxModel) or loaded.program is not None:
            raise UsageError(f"{loaded.name}: models of PyTorch are laid out over cards; give hf:... or a factory")
        from graphmem.capture.session.shape import model_shape  # where torch is missing, loading says so

        return model_shape(
            loaded.build,
            question.sizes,
            name=loaded.name,
            device=as_cuda(question.setting.device),
            torch_version=question.setting.torch_version,
        )


def operator_graph(question: Question) -> Any:
    """The ``torch.fx.Graph`` of the operators of a captured step. Raises :class:`UsageError` for an ONNX graph."""
    with turn():
        loaded = load(question)
        if isinstance(loaded, OnnxModel):
            raise UsageError(f"{loaded.name} is an ONNX graph already; only PyTorch models become torch.fx graphs")
        return _capture(loaded, question, record_graph=True)[0].graph


class _BuiltWith:
    """Builds a model and remembers the precisions that its weights were given, those of the most bytes first."""

    def __init__(self, build: Callable[[Sizes], Built | None]) -> None:
        self._build = build
        self._types: tuple[str, ...] = ()

    def build_with(self, build: Callable[[Sizes], Built | None]) -> None:
        """From now on by this function."""
        self._build = build

    def __call__(self, sizes: Sizes) -> Built | None:
        built = self._build(sizes)
        if built is not None:
            counts: Counter[str] = Counter()
            for parameter in getattr(built.model, "parameters", tuple)():
                is_lazy = hasattr(parameter, "materialize")  # its shape is not known yet
                size = 0 if is_lazy else parameter.numel() * parameter.itemsize
                counts[str(parameter.dtype).removeprefix("torch.")] += size
            self._types = tuple(name for name, _ in counts.most_common())
        return built

    def weights(self, step: Training | Inference) -> str | None:
        """The precisions in words, ``bf16 and fp32``; None where ``--dtype`` said what they are, or nothing has any."""
        if step.dtype != "fp32" or not self._types:
            return None
        short = {spelling: name for name, spellings in DTYPES.items() for spelling in spellings}
        return " and ".join(short.get(name, name) for name in self._types)
