"""Capture a loaded model's step, or a step that runs itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.loop.generation import GENERATIONS, run_generation
from graphmem.capture.loop.loading import loader_for
from graphmem.capture.loop.optimizers.build import own_optimizer
from graphmem.capture.loop.step import run_inference, run_training
from graphmem.capture.ports import DeviceMemory
from graphmem.capture.record.both_loops import BothLoops
from graphmem.capture.record.calls import CallLog
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.session.error_messages import is_refused_by_cards
from graphmem.capture.session.session import Session, capture, raised_by_program, readable_errors, speaks_of_memory
from graphmem.capture.values.messages import Post
from graphmem.capture.values.mirrors import Budget
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.errors import CannotShortenError, CaptureError, GraphmemError, said
from graphmem.run import Run, RunMode
from graphmem.training import Inference, Training
from graphmem.training.optimizers import is_own
from graphmem.training.program import Ending, Program, Steps
from graphmem.units import MIB

if TYPE_CHECKING:
    from graphmem.capture.program.host_retry import Retry
    from graphmem.sources.base import Built, Sizes

#: What becomes of the model's output, by :data:`graphmem.training.LOOPS`.
_KEPT = {
    "hold": "a variable holds the model's output until the next one takes its place (--loop drop: it does not)",
    "drop": "the model's output is dropped before the backward pass",
}

#: The second call finds what the first one allocated.
INFERENCE_ITERATIONS = 2


@dataclass(frozen=True)
class Subject:
    """The subject of a run: ``iterations`` of ``step`` on the model that ``build(sizes)`` gives (None: as many as
    settle it), or all that ``build`` runs itself, returning None, or a ``program`` in its place."""

    build: Callable[[Sizes], Built | None]
    sizes: Sizes
    step: Training | Inference
    name: str
    iterations: int | None = None
    build_on: str = "host"
    program: Program | None = None


def capture_subject(
    subject: Subject,
    mode: RunMode | None = None,
    *,
    device: Device,
    torch_version: tuple[int, int],
    memory: DeviceMemory | None = None,
    say: Callable[[str], None] = lambda _: None,
    record_graph: bool = False,
    cudnn: Cudnn | None = None,
    asked: set[str] | None = None,
    own_settings: bool = True,
    post: Post | None = None,
    calls: CallLog | None = None,
) -> Run:
    """Run the subject on fake tensors; options as of :func:`graphmem.capture.session.session.capture`.

    ``memory`` answers the step's questions about the card's memory, and refuses requests beyond it while ``build`` or
    the program runs; nothing in the step that follows would catch the error. ``say`` is called with the iteration and
    the operators so far whenever a stage begins.

    Raises :class:`graphmem.errors.CaptureError`, of which :class:`graphmem.errors.ProgramOutOfMemory` is one.
    """
    step = subject.step
    followed = _Followed(subject, mode or RunMode(), memory, say)
    run = capture(
        followed,
        source=subject.name,
        device=device,
        torch_version=torch_version,
        data_dependent=step.data_dependent,
        assume=step.assume,
        budget=Budget(step.host_values_mb * MIB, 8 * step.host_values_mb * MIB),
        processes=step.processes,
        leave_after=_steps(subject),
        mode=mode,
        memory=memory,
        record_graph=record_graph,
        cudnn=cudnn,
        asked=asked,
        own_settings=own_settings,
        post=post,
        calls=calls,
    )
    return followed.completed(run)


def _steps(subject: Subject) -> Steps | None:
    """How far a program is followed, to the steps that were asked for or as it is long; None for other subjects."""
    if subject.program is None:
        return None
    return Steps(subject.iterations, events=0) if subject.iterations else Steps()


class _Followed:
    """A subject while it is run, and its results beside the trace."""

    def __init__(
        self, subject: Subject, mode: RunMode, memory: DeviceMemory | None, say: Callable[[str], None]
    ) -> None:
        self._subject, self._mode, self._memory, self._say = subject, mode, memory, say
        step = subject.step
        names = step.optimizer if isinstance(step, Training) else ""
        self._own_optimizer = own_optimizer(names) if is_own(names) else None
        self._notes: list[str] = []
        self._iterations: int | None = None  # of a step that the subject did not run itself
        self._both: BothLoops | None = None
        self._facts: dict[str, Any] = {"is_own_step": True}  # fields of the run
        self._retry: Retry | None = None  # of the statement at which a program failed

    def __call__(self, session: Session) -> None:
        session.recorder.phases.say = self._say
        program = self._subject.program
        if program is not None:
            ending, self._retry = _run(program, session)
            self._notes += _remarks(ending, session)
            self._facts.update(ending=ending, lacks_iterations=_lacks_iterations(session, ending))
            return
        built = self._built()
        if built is None:
            return
        self._facts.update(is_own_step=False, weights=_weights(built.model))
        if self._memory is not None:
            self._memory.lift_limit()
        self._notes += built.notes
        session.recorder.assumed.update(built.remarks)
        self._run_step(session, built)
        self._iterations = session.recorder.phases.iteration

    def _built(self) -> Built | None:
        if self._subject.build_on == "device":
            with cards().own:
                return self._subject.build(self._subject.sizes)
        return self._subject.build(self._subject.sizes)

    def _run_step(self, session: Session, built: Built) -> None:
        step, iterations = self._subject.step, self._subject.iterations
        if isinstance(step, Training):
            loader = None
            if step.has_loader:
                loader = loader_for(self._subject.build, built, self._subject.sizes, step, iterations)
            if self._mode.covers_both_loops and loader is None and step.pp is None and step.compile is None:
                session.recorder.both = self._both = BothLoops(session.recorder.storages)
            ended = run_training(
                session,
                built.model,
                built.inputs,
                built.loss,
                step,
                iterations,
                self._own_optimizer,
                loader,
                self._both,
            )
            self._notes += ended.remarks
            self._facts.update(output_bytes=ended.output_bytes)
        elif step.generate is not None:
            with _shortened(session):
                run_generation(session, built.model, built.inputs, step, iterations or GENERATIONS, built.draft)
        else:
            run_inference(session, built.model, built.inputs, step, iterations or INFERENCE_ITERATIONS)

    def completed(self, run: Run) -> Run:
        """The run with the known facts of its subject."""
        ending: Ending | None = self._facts.get("ending")
        if ending is not None and self._retry is not None and self._retry.passes():
            error = f"{ending.error} (the same passes on the host)"
            self._facts["ending"] = replace(ending, how="unfollowed", error=error)
        if self._iterations is None or not isinstance(self._subject.step, Training):
            iterations = [] if self._iterations is None else [f"{self._iterations} iterations"]
            return replace(run, notes=(*self._notes, *iterations, *run.notes), **self._facts)
        asked = self._subject.step.loop
        if self._both is None:
            return self._of_loop(run, asked)
        dropping = self._of_loop(replace(run, other_loop=None), "drop")
        holding = None if run.other_loop is None else self._of_loop(run.other_loop, "hold")
        if asked == "drop":
            return replace(dropping, other_loop=holding if self._both.covers_both else None)
        if holding is None:
            return replace(dropping, lacks_own_loop=True)
        return replace(holding, other_loop=dropping if self._both.covers_both else None)

    def _of_loop(self, run: Run, loop: str) -> Run:
        notes = (*self._notes, f"{self._iterations} iterations; {_KEPT[loop]}", *run.notes)
        return replace(run, notes=notes, **self._facts)


def _weights(model: nn.Module) -> tuple[str, ...]:
    """The dtypes of the model's parameters, those of the most bytes first."""
    counts: Counter[str] = Counter()
    for parameter in getattr(model, "parameters", tuple)():
        is_lazy = hasattr(parameter, "materialize")  # its shape is not known yet
        size = 0 if is_lazy else parameter.numel() * parameter.itemsize
        counts[str(parameter.dtype).removeprefix("torch.")] += size
    return tuple(name for name, _ in counts.most_common())


def _lacks_iterations(session: Session, ending: Ending) -> bool:
    """True if the collection on the host of a loop that was left early went to the device, or the program failed,
    perhaps for want of it."""
    left_alike = session.leaving is not None and bool(session.leaving.repeated)
    collected = session.recorder.collected
    lacks = ending.failed and ending.how != "memory"
    return (collected is not None and collected.reached_device) or (left_alike and lacks)


def _run(program: Program, session: Session) -> tuple[Ending, Retry | None]:
    """Run a whole program; an error it raises is its ending, with what can be tried again on the host."""
    from graphmem.capture.program.host_retry import retry_of
    from graphmem.capture.program.main_module import run_program

    assert session.leaving is not None
    try:
        with _shortened(session):
            return run_program(program, session.leaving), None
    except CannotShortenError:
        raise
    except Exception as error:
        if isinstance(error, GraphmemError):
            raise
        if speaks_of_memory(error) and session.recorder.storages.refusals:
            return Ending("memory", session.leaving.steps, 1, _in_words(error, session.recorder)), None
        raised = raised_by_program(error)
        if raised is not None:
            return Ending("raised", session.leaving.steps, 1, raised), retry_of(error)
        how = "raised" if is_refused_by_cards(error) else "unfollowed"
        return Ending(how, session.leaving.steps, 1, _in_words(error, session.recorder)), None


def _in_words(error: Exception, recorder: Recorder) -> str:
    """Why an analysis cannot go on."""
    try:
        with readable_errors(recorder):
            raise error
    except CaptureError as found:
        return str(found)


@contextlib.contextmanager
def _shortened(session: Session) -> Iterator[None]:
    """Long generations are shortened in this context. Raises :class:`CannotShortenError` where one fails, or is left,
    while it is put forward, perhaps because of that."""
    try:
        yield
    except Exception as error:
        if session.recorder.is_probing:
            raise CannotShortenError(f"a generation that was put forward raised {said(error)}") from error
        raise
    if session.recorder.is_probing:
        raise CannotShortenError("a generation was left while it was put forward")


def _remarks(ending: Ending, session: Session) -> list[str]:
    assert session.leaving is not None
    remarks = [ending.words()]
    for where, times in session.leaving.repeated.items():
        often = "" if times == 1 else f" ({times} times)"
        alike = f"the loop at {where} was left when its iterations were alike{often}"
        remarks.append(f"{alike}: forward passes of which nothing is kept")
    return remarks
