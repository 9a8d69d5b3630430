"""What is loaded and recorded for a question, and kept for the next one that it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from graphmem import sandbox, sources
from graphmem.answering.other_ranks import run_with_messages
from graphmem.answering.question import Question, capture_key
from graphmem.answering.retries import run_until_served
from graphmem.base.files import without_compiler_folder
from graphmem.base.textbook import ModelShape
from graphmem.base.versions import installed_version
from graphmem.capture.threads import current_threads, turn
from graphmem.cudnn.library import Cudnn
from graphmem.devices import as_cuda
from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.run import Run, RunMode
from graphmem.sources import OnnxModel, TorchModel
from graphmem.trace import Place
from graphmem.training import DTYPES, Inference, Training, other_loop

if TYPE_CHECKING:
    from graphmem.capture.values.messages import Post
    from graphmem.sources.onnx_file import OnnxFile

Made = TypeVar("Made")
#: Who is told how far it is.
Progress = Callable[[str], None]

_OWN_STEP = "custom step function"
#: Frameworks of models whose inputs were bound when they were read.
_OF_ONE_SIZE = ("ONNX", "Keras")


def labelled(say: Progress, what: str) -> Progress:
    """Tells how far a part of something longer is: ``what`` stands before it."""
    return lambda stage: say(f"{what}: {stage}")


def silent(_: str) -> None:
    """Nobody is told."""


class RunCache:
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
        last = self.last
        if last is not None and any(_card_answer(question, fact) != told for fact, told in last.card_answers.items()):
            self.forget()
        if self._of_other_loop(question) is not None:
            model: TorchModel = self._models.made
            return model
        key = capture_key(question)
        return self._models.get(key.loading if question.is_onnx else key, lambda: load(question, self._files))

    def forget(self) -> None:
        """Let the next question load and record anew."""
        self._models.clear()
        self._records.clear()

    @property
    def last(self) -> Run | None:
        """What was recorded last."""
        run: Run | None = self._records.made
        return run

    def recorded(self, question: Question, loaded: OnnxModel | TorchModel, say: Progress = silent) -> Run:
        """The run of a question, whose model :meth:`loaded` gave; ``say`` is told how far it is."""
        return self._of_other_loop(question) or self._records.get(
            capture_key(question), lambda: record(question, loaded, say)
        )

    def _of_other_loop(self, question: Question) -> Run | None:
        """What the last run, which was for the other loop, gives for this one; None where it was for others."""
        last = self.last
        if last is None or last.other_loop is None or not isinstance(question.step, Training):
            return None
        other = replace(question, training=replace(question.step, loop=other_loop(question.step.loop)))
        return last.other_loop if self._records.is_for(capture_key(other)) else None


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
def record(question: Question, loaded: OnnxModel | TorchModel, say: Progress = silent) -> Run:
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
            return _record_step(question, _as_torch_model(loaded), say)
        options = question.planner.parse(question.alloc_conf, question.setting)
        taken = question.planner.plan(loaded.sessions, options, question.iterations)
        return Run(taken.trace, "inference", planned=taken)
    if loaded.framework == "Keras" and (question.step.dtype != "fp32" or question.step.amp):
        raise UsageError(f"{loaded.name}: set the precision with keras.config.set_dtype_policy; drop --dtype and --amp")
    return _planned(question, loaded) or _record_step(question, loaded, say)


def _as_torch_model(loaded: OnnxModel | TorchModel) -> TorchModel:
    """The model as one of PyTorch, by which ONNX graphs are trained."""
    if isinstance(loaded, TorchModel):
        return loaded
    from graphmem.sources.onnx_training import as_torch_model

    return as_torch_model(loaded)


def _planned(question: Question, loaded: TorchModel) -> Run | None:
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
    return Run(taken.trace, words, planned=replace(taken, assumptions=(*taken.assumptions, *told)))


def _record_step(question: Question, loaded: TorchModel, say: Progress) -> Run:
    run = _captured(question, loaded, say)
    if run.is_own_step and not any(s.place == Place.DEVICE for s in run.trace.storages):
        if run.ending is not None:
            raise SourceError(f"{loaded.name}: {run.ending.words()}, and put nothing on the GPU")
        raise SourceError(
            f"{loaded.name} returned nothing and put nothing on the GPU; let it return (model, inputs), or run the "
            "whole step itself on the device 'cuda'"
        )
    return run


def _captured(question: Question, loaded: TorchModel, say: Progress = silent, *, record_graph: bool = False) -> Run:
    """The captured step. Every run but the first loads the model anew, as its code may keep a state."""
    installed_version()  # one that is too old is refused before it is imported
    ready = [loaded]

    def load_model() -> TorchModel:
        return ready.pop() if ready else _as_torch_model(load(question))

    step = _step_for(question, loaded)
    mode = RunMode(
        limited=limit_of(question) is not None,
        shortens=loaded.program is not None or question.sizes.generate is not None,
        covers_both_loops=loaded.framework != "Keras",
    )
    card = question.setting.device
    with contextlib.ExitStack() as stack:
        cudnn = stack.enter_context(Cudnn(question.cudnn, card)) if question.cudnn_library is not None else None
        options: dict[str, Any] = {"cudnn": cudnn, "record_graph": record_graph, "say": say}
        return run_until_served(
            lambda mode: run_with_messages(partial(_run_once, question, mode, options), step, load_model), mode
        )


def _run_once(
    question: Question, mode: RunMode, how: dict[str, Any],
    loaded: TorchModel, step: Training | Inference, post: Post | None,
) -> Run:  # fmt: skip
    """One run of ``step`` in ``mode``; ``post`` has the messages of other processes, ``how`` are further options."""
    from graphmem.capture.session.run import Subject, capture_subject

    card, asked = question.setting.device, set[str]()
    runtime = question.runtime_by_default(loaded.runtime)
    options = runtime.parse(question.alloc_conf, question.setting)
    subject = Subject(
        loaded.build, question.sizes, step, loaded.name, question.iterations, question.build_on, loaded.program
    )
    happened: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if loaded.program is not None:
            happened = stack.enter_context(sandbox.attempt(lambda: current_threads() is not None))
        run = capture_subject(
            subject,
            mode,
            device=as_cuda(card),
            torch_version=question.setting.torch_version,
            told=asked,
            memory=runtime.live(options, question.setting, limited=mode.limited),
            own_settings=question.alloc_conf is None,
            post=post,
            **how,
        )
    if run.refusals:
        asked.add("allocator")
    beside: dict[str, Any] = {
        "card_answers": {fact: _card_answer(question, fact) for fact in sorted(asked)},
        "limit": limit_of(question),
        "sandbox": happened,
    }
    notes = (*loaded.notes, *filter(None, [mode.remark]))

    def complete(run: Run, step: Training | Inference) -> Run:
        other = run.other_loop
        if other is not None and isinstance(step, Training):
            other = complete(other, replace(step, loop=other_loop(step.loop)))
        words = _in_words(run, step, loaded)
        return replace(run, step=words, notes=(*notes, *run.notes), other_loop=other, **beside)

    return complete(run, question.step)


def _in_words(run: Run, step: Training | Inference, loaded: TorchModel) -> str:
    """The step of a captured run, for the reader."""
    if not run.is_own_step:
        return step.describe(_precisions(run, step))
    words = loaded.step_words or _OWN_STEP
    if run.ending is not None:
        launcher = loaded.program.launcher if loaded.program is not None else ""
        words = f"whole program, {run.ending.steps} optimizer steps{launcher and ', '}{launcher}"
    if isinstance(step, Training) and step.processes is not None:
        words += f", {step.processes.describe()}"
    return words


def _precisions(run: Run, step: Training | Inference) -> str | None:
    """The precisions of the weights, ``bf16 and fp32``; None where ``--dtype`` said them, or there are no weights."""
    if step.dtype != "fp32" or not run.weights:
        return None
    short = {spelling: name for name, spellings in DTYPES.items() for spelling in spellings}
    return " and ".join(short.get(name, name) for name in run.weights)


def _step_for(question: Question, loaded: TorchModel) -> Training | Inference:
    """The step as it is run. Keras' own ``train_step`` returns what it needs of a step, and no output outlives it."""
    step = question.step
    if not isinstance(step, Training):
        return step
    if step.epoch.varies and loaded.framework in _OF_ONE_SIZE:
        raise UsageError(f"{loaded.name}: its inputs have one size; leave out seq_lens, last_batch and eval_batches")
    return replace(step, loop="drop") if loaded.framework == "Keras" else step


def could_go_on(question: Question, run: Run) -> bool:
    """Whether ``run`` is of a program that has not run within the card of ``question``: where memory ends there, it
    may catch the error."""
    return run.is_own_step and limit_of(question) is not None and run.limit != limit_of(question)


def limit_of(question: Question) -> Hashable:
    """What decides when memory runs out on the card that was named; None where none was."""
    if question.device is None:
        return None
    card, configuration = (
        question.setting.device,
        (question.runtime, question.alloc_conf, question.setting.torch_version),
    )
    return card.capacity_bytes, card.taken_bytes, configuration


def _card_answer(question: Question, fact: str) -> Any:
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
        return _captured(question, loaded, record_graph=True).graph
