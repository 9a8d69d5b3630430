"""The run of a question: the model loaded, its step captured or planned, and kept for the next question it serves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphmem import sources
from graphmem.answering import capture_cache
from graphmem.answering.deep import run_of_layers
from graphmem.answering.other_ranks import run_with_messages
from graphmem.answering.question import CaptureKey, Question, capture_key
from graphmem.answering.retries import run_until_served
from graphmem.answering.waiting import let_wait
from graphmem.base import garbage
from graphmem.base.files import without_compiler_folder
from graphmem.base.versions import installed_version
from graphmem.capture.threads import current_threads, turn
from graphmem.cudnn.library import Cudnn
from graphmem.devices import as_cuda
from graphmem.errors import GraphmemError, NothingOnDevice, SourceError, UsageError
from graphmem.run import Run, RunMode
from graphmem.runtimes import all_runtimes
from graphmem.runtimes.base import Graphs, Runtime
from graphmem.sources import OnnxModel, TorchModel
from graphmem.trace import Place
from graphmem.training import DTYPES, Inference, Training, other_loop

if TYPE_CHECKING:
    from torch import fx

    from graphmem.base.textbook import ModelShape
    from graphmem.capture.record.calls import CallLog
    from graphmem.capture.values.messages import Post
    from graphmem.sources.onnx_file import OnnxFile

Made = TypeVar("Made")
#: Hears how far an analysis is.
Progress = Callable[[str], None]

_OWN_STEP = "custom step function"
#: Sources of models whose own code looks at no other process.
_OF_ONE_PROCESS = ("hf", "timm", "torchvision", "zoo")
#: Frameworks of models whose inputs were bound when they were read.
_OF_ONE_SIZE = ("ONNX", "Keras")


def labelled(say: Progress, label: str) -> Progress:
    """The progress of a part of something longer, with a label before it."""
    return lambda stage: say(f"{label}: {stage}")


def counted(say: Progress, done: int, total: int) -> None:
    """Tell somebody who hears a progress, and counts (has a ``count``), how many of how many are done."""
    count = getattr(say, "count", None)
    if count is not None:
        count(done, total)


def silent(_: str) -> None:
    """Progress that nobody hears."""


class RunCache:
    """The last model and its last run, kept for the next question: one with an equal :class:`CaptureKey` takes them.

    A step's own code may ask the card for its name or its memory, or be refused some; such a run serves only cards
    that would have answered the same. One run is kept at a time, so questions are best asked key by key.
    """

    def __init__(self) -> None:
        self._files: dict[Any, OnnxFile] = {}
        self._models: _Slot[OnnxModel | TorchModel] = _Slot()
        self._runs: _Slot[Run] = _Slot()

    @property
    def last(self) -> Run | None:
        """The last run."""
        return self._runs.made

    def forget(self) -> None:
        """Let the next question load and run anew."""
        self._models.clear()
        self._runs.clear()

    def serves(self, question: Question) -> bool:
        """Whether the last run, or that of the other loop that was recorded with it, answers a question. Raises
        :class:`UsageError` for options that the runtime refuses."""
        key = capture_key(question)
        if self.last is None or not _answers_alike(self.last, question):
            return False
        return self._runs.is_for(key) or self._of_other_loop(question, key) is not None

    def keep(self, question: Question, run: Run) -> None:
        """The run of a question that was had without running its step; its model is the one of the last run."""
        key = capture_key(question)
        self._models.keep(key, self._models.made)
        self._runs.keep(key, run)

    def model(self, question: Question) -> OnnxModel | TorchModel:
        """The model of a question, for its run too. Raises :class:`GraphmemError`."""
        with turn(), prepared(question):
            return self._model(question, capture_key(question))

    def _model(self, question: Question, key: CaptureKey) -> OnnxModel | TorchModel:
        return self._models.get(key.loading if question.is_onnx else key, lambda: load(question, self._files))

    def run(self, question: Question, say: Progress = silent, calls: CallLog | None = None) -> Run:
        """The run of a question; of one that is captured now, ``calls`` notes the calls of kernels' rules. Another
        thread's is waited for. Raises :class:`GraphmemError`.

        An ONNX file is read once; a factory is made anew for every run, as its code may keep a state.
        """
        with turn():
            say("loading")
            if self.last is not None and not _answers_alike(self.last, question):
                self.forget()
            key, disk = capture_key(question), capture_cache.in_use
            place = None if disk is None else disk.place(question, key)
            known = self._known(question, key, say, place if calls is None else None)
            if known is not None and self._models.made is None:  # as it was not run here
                return known
            with prepared(question):
                loaded = self._models.made
                if known is None or loaded is None:
                    loaded = self._model(question, key)
                runtime_for(question, loaded).parse(question.alloc_conf, question.setting)
                say("tracing")
                model, is_new = loaded, known is None and not self._runs.is_for(key)
                run = known or self._runs.get(key, lambda: _made(question, model, say, calls))
            if disk is not None and place is not None and is_new:
                disk.keep(place, question.model, run)
            return run

    def _known(self, question: Question, key: CaptureKey, say: Progress, place: Path | None) -> Run | None:
        """The run that is there already: of the other loop, or on the disk at this place."""
        known = self._of_other_loop(question, key)
        if known is None and self._models.made is None and self._runs.is_for(key):
            known = self.last
        disk = capture_cache.in_use
        if known is None and disk is not None and place is not None and not self._runs.is_for(key):
            run = disk.recalled(place)
            if run is not None and _answers_alike(run, question) and not could_go_on(question, run):
                self.forget()
                self._runs.keep(key, run)
                say("captured before")
                known = run
        if known is None or self._models.made is not None:
            return known
        runtime = question.runtime_by_default(known.runtime)
        if not (runtime.graphs is Graphs.CAPTURED if question.is_onnx else runtime.captures):
            return None  # it is refused in the words of the model
        runtime.parse(question.alloc_conf, question.setting)
        return known

    def _of_other_loop(self, question: Question, key: CaptureKey) -> Run | None:
        """The run of the question's loop that was recorded with the last run, of the other loop; None without."""
        if self.last is None or self.last.other_loop is None or not isinstance(question.step, Training):
            return None
        known = self._runs.key
        if not isinstance(known, CaptureKey) or getattr(known.step, "loop", "") != other_loop(question.step.loop):
            return None
        other = replace(key, step=replace(question.step, loop=other_loop(question.step.loop)))
        return self.last.other_loop if other == known else None


class _Slot(Generic[Made]):
    """The value made last, or the error in its place, with the key that it was made for."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.key: CaptureKey | tuple[object, ...] | None = None
        self.made: Made | None = None
        self._error: GraphmemError | None = None

    def keep(self, key: CaptureKey | tuple[object, ...], made: Made | None) -> None:
        """The value for this key."""
        self.key, self.made, self._error = key, made, None

    def is_for(self, key: CaptureKey | tuple[object, ...]) -> bool:
        """True if the value was made for an equal key."""
        return self.key is not None and self.key == key

    def get(self, key: CaptureKey | tuple[object, ...], make: Callable[[], Made]) -> Made:
        """The value made for an equal ``key``, else the result of ``make`` now; errors too are kept."""
        if not self.is_for(key):
            self.clear()  # before the next is made
            try:
                self.made = make()
            except GraphmemError as error:
                self._error = error
            self.key = key
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self.made is not None
        return self.made


@contextlib.contextmanager
def prepared(question: Question) -> Iterator[None]:
    """Whatever imports PyTorch for a question: what it has no need of waits, and what is looked at is noted for the
    captures on the disk."""
    disk = capture_cache.in_use
    with without_compiler_folder(), contextlib.nullcontext() if disk is None else disk.watched():
        let_wait(question)
        yield


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


def _as_torch_model(loaded: OnnxModel | TorchModel) -> TorchModel:
    """The model as one of PyTorch, by which ONNX graphs are trained."""
    if isinstance(loaded, TorchModel):
        return loaded
    from graphmem.sources.onnx_training import as_torch_model

    return as_torch_model(loaded)


def runtime_for(question: Question, loaded: OnnxModel | TorchModel) -> Runtime[object]:
    """The runtime of a question. Raises :class:`UsageError` where it cannot run the step, or not with these options."""
    if isinstance(loaded, TorchModel):
        return _capturing(question.runtime_by_default(loaded.runtime), loaded)
    step, is_training = question.step, isinstance(question.step, Training)
    runtime = question.runtime_by_default(OnnxModel.trained_by if is_training else OnnxModel.runtime)
    accepted = (Graphs.CAPTURED,) if is_training else (Graphs.CAPTURED, Graphs.PLANNED)
    if runtime.graphs not in accepted:
        names = _one_of([other.name for other in all_runtimes() if other.graphs in accepted])
        done = "an ONNX graph is trained" if is_training else "ONNX graphs run"
        raise UsageError(f"{loaded.name}: {done} under --runtime {names}, not {runtime.name}")
    own = f"{loaded.name}: an ONNX graph has its own precision; drop --dtype"
    if runtime.graphs is Graphs.CAPTURED:
        if step.dtype != "fp32":
            raise UsageError(own)
        if isinstance(step, Training) and step.checkpoint_activations:
            raise UsageError(f"{loaded.name}: an ONNX graph has no blocks to recompute; drop --checkpoint-activations")
    elif step.dtype != "fp32" or step.amp:
        raise UsageError(f"{own} and --amp")
    return runtime


def _capturing(runtime: Runtime[object], loaded: TorchModel) -> Runtime[object]:
    if not loaded.captured and runtime.name != loaded.runtime:
        raise UsageError(
            f"{loaded.name} is a {loaded.framework} program, which runs under --runtime {loaded.runtime} alone"
        )
    if not runtime.captures:
        names = _one_of([other.name for other in all_runtimes() if other.captures])
        raise UsageError(
            f"{loaded.name} is a {loaded.framework} model; export it to ONNX for {runtime.title}, or use --runtime "
            f"{names}"
        )
    return runtime


def _one_of(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# --- running ----------------------------------------------------------------------------------------------------------


def _made(question: Question, loaded: OnnxModel | TorchModel, say: Progress, calls: CallLog | None) -> Run:
    """The run by a template of the model's layers, where there is one and nobody notes ``calls``; else of all it is."""

    def capture(asked: Question) -> Run:
        return record(asked, load(asked), labelled(say, f"with {asked.layers} of its layers"))

    return (run_of_layers(question, loaded, capture) if calls is None else None) or record(question, loaded, say, calls)


@without_compiler_folder()
def record(
    question: Question, loaded: OnnxModel | TorchModel, say: Progress = silent, calls: CallLog | None = None
) -> Run:
    """Plan the graph, or capture the step, whose kernels' ``calls`` are noted. Raises :class:`GraphmemError`."""
    _check_options(question, loaded)
    if isinstance(loaded, TorchModel):
        return _planned(question, loaded) or _record_step(question, loaded, say, calls)
    if question.planner is None:
        return _record_step(question, _as_torch_model(loaded), say, calls)
    options = question.planner.parse(question.alloc_conf, question.setting)
    taken = question.planner.plan(loaded.sessions, options, question.iterations)
    return Run(taken.trace, loaded.name, loaded.runtime, "inference", planned=taken)


def _check_options(question: Question, loaded: OnnxModel | TorchModel) -> None:
    """Raises :class:`UsageError` for options that are not for such a model."""
    step, kind = question.step, str(question.model).partition(":")[0]
    if isinstance(step, Training) and (step.world_size or 1) > 1 and kind in _OF_ONE_PROCESS and not step.shares_out:
        raise UsageError(
            f"{loaded.name}: a world_size of {step.world_size} alone changes nothing; say too how the processes share "
            "the step (ddp, fsdp, zero, tp, pp), or leave it out"
        )
    torch_model = loaded if isinstance(loaded, TorchModel) else None
    if question.sizes.weights is not None and not (torch_model and torch_model.quantizes):
        raise UsageError(
            f"{loaded.name}: quantised weights are those of transformers' models (hf:...); quantise the model in a "
            "program of your own, and drop weights"
        )
    if question.sizes.attention_mask is not None and not (torch_model and torch_model.masks):
        raise UsageError(
            f"{loaded.name}: attention_mask is made for transformers' models (hf:...); make the mask where the other "
            "inputs are made, and leave attention_mask out"
        )
    if torch_model and not torch_model.captured and not _is_plain(question.step):
        raise UsageError(
            f"{loaded.name}: a {torch_model.framework} program says itself what its step is; drop the options of the "
            "step, but --world-size (cards that it sees)"
        )
    if torch_model and torch_model.framework == "Keras" and (question.step.dtype != "fp32" or question.step.amp):
        raise UsageError(f"{loaded.name}: set the precision with keras.config.set_dtype_policy; drop --dtype and --amp")


def _is_plain(step: Training | Inference) -> bool:
    """Whether nothing was asked of the step but a number of processes."""
    return step == (Training(world_size=step.world_size) if isinstance(step, Training) else Inference())


def _planned(question: Question, loaded: TorchModel) -> Run | None:
    """The run as the model's own runtime plans it; None where another is asked for, or it does not plan the step."""
    if loaded.planned is None or question.runtime_by_default(loaded.runtime).name != loaded.runtime:
        return None
    sizes = replace(question.sizes, training=isinstance(question.step, Training), iterations=question.iterations)
    with asked_cudnn(question) as cudnn:
        taken = loaded.planned(sizes, question.setting.device, cudnn)
        if taken is not None and cudnn is not None:
            taken = replace(taken, assumptions=(*taken.assumptions, *cudnn.notes()))
    if taken is None:
        return None
    words = loaded.step_words if sizes.training else "inference"
    return Run(taken.trace, loaded.name, loaded.runtime, words, planned=taken)


def asked_cudnn(question: Question) -> contextlib.AbstractContextManager[Cudnn | None]:
    """The cuDNN that is asked for plans of convolutions, if there is one."""
    if question.cudnn_library is None:
        return contextlib.nullcontext()
    return Cudnn(question.cudnn, question.setting.device)


def _record_step(question: Question, loaded: TorchModel, say: Progress, calls: CallLog | None) -> Run:
    run = _captured(question, loaded, say, calls=calls)
    if run.is_own_step and not any(s.place == Place.DEVICE for s in run.trace.storages):
        if run.ending is not None:
            raise NothingOnDevice(f"{loaded.name}: {run.ending.words()}, and put nothing on the GPU", run.ending.code)
        raise SourceError(
            f"{loaded.name} returned nothing and put nothing on the GPU; let it return (model, inputs), or run the "
            "whole step itself on the device 'cuda'"
        )
    return run


def _captured(
    question: Question, loaded: TorchModel, say: Progress = silent, *,
    record_graph: bool = False, calls: CallLog | None = None,
) -> Run:  # fmt: skip
    """The captured step. Every run but the first loads the model anew, as its code may keep a state."""
    installed_version()  # one that is too old is refused before it is imported
    ready = [loaded]

    def load_model() -> TorchModel:
        return ready.pop() if ready else _as_torch_model(load(question))

    step = _step_for(question, loaded)
    mode = RunMode(
        room=0 if limit_of(question) is None else 1,
        shortens=calls is None and (loaded.program is not None or question.sizes.generate is not None),
        covers_both_loops=calls is None and loaded.framework != "Keras",
    )
    with asked_cudnn(question) as cudnn:
        run_once = partial(_run_once, question, say, cudnn, record_graph, calls)
        return run_until_served(lambda mode: run_with_messages(partial(run_once, mode), step, load_model), mode)


def _run_once(
    question: Question, say: Progress, cudnn: Cudnn | None, record_graph: bool, calls: CallLog | None,
    mode: RunMode, loaded: TorchModel, step: Training | Inference, post: Post | None,
) -> Run:  # fmt: skip
    """One run of ``step`` in ``mode``; ``post`` has the messages of other processes."""
    from graphmem import sandbox
    from graphmem.capture.session.run import Subject, capture_subject

    asked = set[str]()
    runtime = question.runtime_by_default(loaded.runtime)
    options = runtime.parse(question.alloc_conf, question.setting)
    subject = Subject(
        loaded.build, question.sizes, step, loaded.name, question.iterations, question.build_on, loaded.program
    )
    with contextlib.ExitStack() as stack:
        if mode.room > 1:  # it has said what it says within the card
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(garbage.as_usual())
        is_program = loaded.program is not None
        sandboxed = stack.enter_context(sandbox.attempt(lambda: current_threads() is not None)) if is_program else {}
        run = capture_subject(
            subject,
            mode,
            device=as_cuda(question.setting.device),
            torch_version=question.setting.torch_version,
            asked=asked,
            memory=runtime.live(options, question.setting, room=mode.room),
            own_settings=question.alloc_conf is None,
            post=post,
            cudnn=cudnn,
            record_graph=record_graph,
            calls=calls,
            say=say,
        )
    if run.refusals:
        asked.add("allocator")
    known: dict[str, Any] = {
        "model": loaded.name,
        "runtime": loaded.runtime,
        "card_answers": {fact: _card_answer(question, fact) for fact in sorted(asked)},
        "limit": limit_of(question),
        "sandbox": sandboxed,
    }

    def completed(run: Run, step: Training | Inference) -> Run:
        usual, unusual = _beside_usual(step, question.usual_step)
        remarks = (*loaded.notes, *filter(None, [mode.remark, unusual]))
        other, loop = run.other_loop, ""
        if isinstance(step, Training):
            loop = step.loop if not run.is_own_step and loaded.framework != "Keras" else ""
            other = other and completed(other, replace(step, loop=other_loop(step.loop)))
        words = f"{_in_words(run, step, loaded)}{usual}"
        return replace(run, step=words, loop=loop, notes=(*remarks, *run.notes), other_loop=other, **known)

    return completed(run, question.step)


def _beside_usual(step: Training | Inference, usual: Training | Inference | None) -> tuple[str, str]:
    """Words behind the step of a model of the zoo where it is the usual one, and a note where it is another: a model of
    the same name from elsewhere makes another step."""
    if usual is None or usual.describe() == step.describe():
        return ("" if usual is None else " (the zoo's usual step)"), ""
    return "", f"the step is what its options say, and not the zoo's usual one ({usual.describe()})"


def _in_words(run: Run, step: Training | Inference, loaded: TorchModel) -> str:
    """The step of a captured run, for the reader."""
    if not run.is_own_step:
        return step.describe(_precisions(run, step))
    words = loaded.step_words or _OWN_STEP
    if run.ending is not None:
        more = f" ({run.ending.more})" if run.ending.more else ""
        words = f"whole program, {run.ending.steps} optimizer steps{more}"
    if isinstance(step, Training) and step.processes is not None:
        words += f", {step.processes.describe()}"
    return words


def _precisions(run: Run, step: Training | Inference) -> str | None:
    """The precisions of the weights, ``bf16 and fp32``; None where ``--dtype`` names them, or there are no weights."""
    if step.dtype != "fp32" or not run.weights:
        return None
    short = {spelling: name for name, spellings in DTYPES.items() for spelling in spellings}
    return " and ".join(short.get(name, name) for name in run.weights)


def _step_for(question: Question, loaded: TorchModel) -> Training | Inference:
    """The step as it is run. Keras' own ``train_step`` returns all it needs of a step, and no output outlives it."""
    step = question.step
    if not isinstance(step, Training):
        return step
    if step.epoch.varies and loaded.framework in _OF_ONE_SIZE:
        raise UsageError(f"{loaded.name}: its inputs have one size; leave out seq_lens, last_batch and eval_batches")
    return replace(step, loop="drop") if loaded.framework == "Keras" else step


# --- what the card decides --------------------------------------------------------------------------------------------


def could_go_on(question: Question, run: Run) -> bool:
    """True if ``run`` is of a program that has not run within the card of ``question``: where memory ends there, it may
    catch the error."""
    return run.is_own_step and limit_of(question) is not None and run.limit != limit_of(question)


def limit_of(question: Question) -> Hashable:
    """The facts that decide when memory runs out on the card that was named; None where none was."""
    if question.device is None:
        return None
    card, setting = question.setting.device, question.setting
    return card.capacity_bytes, card.taken_bytes, (question.runtime, question.alloc_conf, setting.torch_version)


def _answers_alike(run: Run, question: Question) -> bool:
    """True if the card of a question answers as that of the run did."""
    return all(_card_answer(question, fact) == answer for fact, answer in run.card_answers.items())


def _card_answer(question: Question, fact: str) -> Hashable:
    """A fact that a step's own code asked of the card, or of the allocator, for which the whole of its options
    stands."""
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


# --- a model without a step, and a step without figures ---------------------------------------------------------------


def shape_of(question: Question) -> ModelShape:
    """The layers and sizes of the model of a question. Raises :class:`GraphmemError`."""
    with prepared(question), turn():
        if not question.is_compiled:
            installed_version()
        loaded = load(question)
        if isinstance(loaded, OnnxModel) or loaded.program is not None or not loaded.captured:
            raise UsageError(f"{loaded.name}: models of PyTorch are laid out over cards; give hf:... or a factory")
        from graphmem.capture.session.shape import model_shape  # where torch is missing, loading says so

        return model_shape(
            loaded.build,
            question.sizes,
            name=loaded.name,
            device=as_cuda(question.setting.device),
            torch_version=question.setting.torch_version,
        )


def operator_graph(question: Question) -> fx.Graph:
    """The operators of a captured step. Raises :class:`UsageError` for an ONNX graph."""
    with turn():
        loaded = load(question)
        if isinstance(loaded, OnnxModel):
            raise UsageError(f"{loaded.name} is an ONNX graph already; only PyTorch models become torch.fx graphs")
        return _captured(question, loaded, record_graph=True).graph
