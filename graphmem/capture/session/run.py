"""Capture a loaded model's step, or a step that runs itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphmem import versions
from graphmem.capture.device.pretend_device import cards
from graphmem.capture.loop.generation import GENERATIONS, run_generation
from graphmem.capture.loop.loading import loader_for
from graphmem.capture.loop.optimizers.own import own_optimizer
from graphmem.capture.loop.step import run_inference, run_training
from graphmem.capture.ports import DeviceMemory, LoopsBook
from graphmem.capture.record.both_loops import BothLoops
from graphmem.capture.session.session import Captured, Session, capture, raised_by_program, speaks_of_memory
from graphmem.capture.values.known_values import Budget
from graphmem.capture.values.messages import Post
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CannotShortenError, said
from graphmem.figures import Communicator
from graphmem.textbook import Sharded
from graphmem.trace import Trace
from graphmem.training import Inference, Training
from graphmem.training.program import OPTIMIZER_STEPS, Ending, Program
from graphmem.units import MIB, format_bytes

#: What becomes of the model's output, by :data:`graphmem.training.LOOPS`.
_KEPT = {
    "hold": "a variable holds the model's output until the next one takes its place (--loop drop: it does not)",
    "drop": "the model's output is dropped before the backward pass",
}

#: The second call finds what the first one allocated.
INFERENCE_ITERATIONS = 2


@dataclass(frozen=True)
class CapturedModel:
    """The trace of a model's step. ``unknown`` counts what was not modelled (diagnostic -> count), ``decided`` assumed
    values that decide sizes or branches; ``cudnn`` is what was asked, ``ending`` how a whole program ended,
    ``refusals`` say who was refused memory and went on. ``wants_every_iteration``: a loop that was left early
    is missed. ``other_loop``: the same of the other of :data:`graphmem.training.LOOPS`, where one run told both;
    ``wants_own_loop``: it did not tell the one that was asked for, which is to be run alone."""

    trace: Trace
    notes: tuple[str, ...]
    unknown: dict[Diagnostic, int]
    custom_step: bool
    installed_version: tuple[int, int]
    graph: Any | None = None
    cudnn: Cudnn | None = None
    ending: Ending | None = None
    refusals: tuple[Diagnostic, ...] = ()
    decided: dict[Diagnostic, int] = field(default_factory=dict)
    wants_every_iteration: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # ranks of each process group of several that the step is in
    communicators: tuple[Communicator, ...] = ()  # those of the groups that were used
    sharded: Sharded | None = None  # how the model is shared out among processes
    optimizer: str = ""  # the class of the first one that stepped
    output_bytes: int = 0  # the largest output of the model in the default step's iterations
    other_loop: CapturedModel | None = None
    wants_own_loop: bool = False
    sandbox: dict[str, Any] = field(default_factory=dict)  # of a whole program: what it would have done to files


def capture_model(
    build: Callable[[Any], Any],
    sizes: Any,
    step: Training | Inference,
    *,
    name: str,
    device: Device,
    torch_version: tuple[int, int],
    iterations: int | None,
    build_on: str = "host",
    record_graph: bool = False,
    cudnn: Cudnn | None = None,
    told: set[str] | None = None,
    program: Program | None = None,
    memory: DeviceMemory | None = None,
    shortens: bool = False,
    leaves_alike: bool = True,
    tells_both: bool = False,
    own_settings: bool = True,
    post: Post | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> CapturedModel:
    """Build the model on fake tensors and run ``iterations`` of its step (None: as many as settle it).

    ``build`` returning None has run it all; a ``program`` is run in its place, long generations followed in part where
    it ``shortens``, loops of alike iterations left early where it ``leaves_alike``. The default training step
    ``tells_both`` loops in one run where it can. ``cudnn`` is asked for the plans of convolutions. ``told`` is filled
    with what the step's own code asked of the card. ``memory`` answers it, and refuses what exceeds it while ``build``
    or the program runs; nothing in the step that follows would catch the error. ``say`` is told the iteration and the
    operators so far whenever a stage begins.

    Raises :class:`graphmem.errors.CaptureError`, of which :class:`graphmem.errors.ProgramOutOfMemory` is one.
    """
    notes: list[str] = []
    custom = [False]
    ran: list[int] = []
    endings: list[Ending] = []
    missed: list[bool] = []
    output_bytes = [0]
    ran_both: list[LoopsBook | None] = []

    own = own_optimizer(step) if isinstance(step, Training) else None

    def run(session: Session) -> None:
        session.recorder.say = say
        if program is not None:
            endings.append(_run(program, session))
            notes.extend(_remarks(endings[0], session))
            missed.append(_misses_iterations(session, endings[0]))
        built = _built(build, sizes, build_on) if program is None else None
        if built is None:
            custom[0] = True
            return
        if memory is not None:
            memory.lift_limit()
        notes.extend(built.notes)
        if isinstance(step, Training):
            loader = loader_for(build, built, sizes, step, iterations)
            if tells_both and loader is None and step.pp is None and step.compile is None:
                session.recorder.both = BothLoops(session.recorder.storages)
            both = session.recorder.both
            ended = run_training(session, built.model, built.inputs, built.loss, step, iterations, own, loader, both)
            ran_both.append(both)
            notes.extend(ended.remarks)
            output_bytes[0] = ended.output_bytes
        elif step.generate is not None:
            with _shortened(session):
                run_generation(session, built.model, built.inputs, step, iterations or GENERATIONS, built.draft)
        else:
            run_inference(session, built.model, built.inputs, step, iterations or INFERENCE_ITERATIONS)
        ran.append(session.recorder.iteration)

    captured = capture(
        run,
        source=name,
        device=device,
        told=told,
        torch_version=torch_version,
        record_graph=record_graph,
        data_dependent=step.data_dependent,
        assume=step.assume,
        budget=Budget(step.host_values_mb * MIB, 8 * step.host_values_mb * MIB),
        cudnn=cudnn,
        processes=step.processes,
        post=post,
        leave_after=None if program is None else iterations or OPTIMIZER_STEPS,
        memory=memory,
        shortens=shortens,
        leaves_alike=leaves_alike,
        own_settings=own_settings,
    )
    if not custom[0] and not isinstance(step, Training):
        notes.append(f"{ran[0]} iterations")
    notes.extend(captured.notes)
    made = CapturedModel(
        captured.trace,
        tuple(notes),
        captured.assumed,
        custom[0],
        _installed(),
        captured.graph,
        cudnn,
        endings[0] if endings else None,
        tuple(_refusals(captured)),
        captured.decided,
        any(missed),
        captured.groups,
        captured.communicators,
        captured.sharded,
        captured.optimizer,
        output_bytes[0],
    )
    if custom[0] or not isinstance(step, Training):
        return made
    at = len(notes) - len(captured.notes)
    by_loop = {
        loop: replace(made, notes=(*notes[:at], f"{ran[0]} iterations; {kept}", *notes[at:]))
        for loop, kept in _KEPT.items()
    }
    return _as_asked(by_loop, step.loop, ran_both[0], captured.held)


def _as_asked(
    by_loop: dict[str, CapturedModel], asked: str, both: LoopsBook | None, held: Trace | None
) -> CapturedModel:
    """Of both loops, each with the trace of the run, the one that was asked for, with the other one if it was told.

    The run has dropped its outputs as far as it told ``both``, and ``held`` is the trace of a loop that held them."""
    if both is None:
        return by_loop[asked]
    dropping, holding = by_loop["drop"], None if held is None else replace(by_loop["hold"], trace=held)
    if asked == "drop":
        return replace(dropping, other_loop=holding if both.is_told else None)
    if holding is None:
        return replace(by_loop["hold"], wants_own_loop=True)
    return replace(holding, other_loop=dropping if both.is_told else None)


def _misses_iterations(session: Session, ending: Ending) -> bool:
    """Whether what a loop that was left early would have collected on the host went to the device, or the program
    failed, perhaps for want of it."""
    left_alike = session.leaving is not None and bool(session.leaving.repeated)
    return session.recorder.collected.reached_device or (left_alike and ending.failed)


def _run(program: Program, session: Session) -> Ending:
    """Run a whole program; what it raises is how it ended."""
    from graphmem.capture.program.main_module import run_program

    assert session.leaving is not None
    try:
        with _shortened(session):
            return run_program(program, session.leaving)
    except CannotShortenError:
        raise
    except Exception as error:
        raised = raised_by_program(error)
        if raised is None or (speaks_of_memory(error) and session.recorder.storages.refusals):
            raise
        return Ending("raised", session.leaving.steps, 1, raised)


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


def _refusals(captured: Captured) -> Iterator[Diagnostic]:
    """Who was refused memory, and how much: one for every line of the program."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for refusal in captured.refusals:
        operator = captured.trace.operators[refusal.operator]
        place = operator.source or operator.module or "graphmem's loop"
        by_place.setdefault((place, operator.name), []).append(captured.trace.storages[refusal.storage].bytes)
    for (place, name), sizes in by_place.items():
        least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
        times = "once" if len(sizes) == 1 else f"{len(sizes)} times"
        asked = most if least == most else f"{least} to {most}"
        yield Code.REFUSED.about(place=place, operator=name, times=times, asked=asked)


def _built(build: Callable[[Any], Any], sizes: Any, build_on: str) -> Any:
    if build_on == "device":
        with cards().own:
            return build(sizes)
    return build(sizes)


def _installed() -> tuple[int, int]:
    return versions.version_of(torch.__version__)
