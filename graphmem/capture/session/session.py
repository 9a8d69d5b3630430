"""One capture: sets up the pretended device, runs the step on it, and returns the Trace."""

from __future__ import annotations

import collections
import contextlib
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from graphmem import torch_names
from graphmem.base import deferred
from graphmem.base.versions import version_of
from graphmem.capture.device.pretend_device import ShownCard, numbered
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.patches import Patches
from graphmem.capture.ports import DeviceMemory
from graphmem.capture.record.calls import CallLog
from graphmem.capture.record.cublas_workspaces import Workspaces
from graphmem.capture.record.garbage import Garbage
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.record.storages import Refusal
from graphmem.capture.session.error_messages import explained
from graphmem.capture.session.interrupts import Interrupts
from graphmem.capture.session.layers import LAYERS, Context
from graphmem.capture.session.neutral import neutral_state
from graphmem.capture.session.settings import ProgramSettings
from graphmem.capture.threads import capturing
from graphmem.capture.torch_internals import Never, disable_current_modes
from graphmem.capture.values.assumed_values import AssumedValues, Assumptions, Selection
from graphmem.capture.values.callers import raised_at
from graphmem.capture.values.known_values import KnownValues
from graphmem.capture.values.messages import Post
from graphmem.capture.values.mirrors import Budget
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError, GraphmemError, ProgramOutOfMemory, said
from graphmem.run import Run, RunMode
from graphmem.torch_names import absences, private
from graphmem.trace import Category, Trace, TraceBuilder
from graphmem.training.processes import Processes, cards_of
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.capture.program.leaving import Leaving
    from graphmem.capture.record import modules
    from graphmem.training.program import Steps

_LOST = "why an operator cannot be followed is told in PyTorch's words"
DataDependentOutputException: Any = private("torch._subclasses.fake_tensor.DataDependentOutputException", _LOST, Never)
DynamicOutputShapeException: Any = private("torch._subclasses.fake_tensor.DynamicOutputShapeException", _LOST, Never)
UnsupportedOperatorException: Any = private("torch._subclasses.fake_tensor.UnsupportedOperatorException", _LOST, Never)


class Session:
    """The services of a captured step: the recorder, and the way of tensors to the device."""

    def __init__(self, recorder: Recorder, watch: modules.ModuleWatch, leaving: Leaving | None = None) -> None:
        self.recorder = recorder
        self.watch = watch
        self.leaving = leaving

    @property
    def operator_count(self) -> int:
        """The number of operators recorded so far."""
        return self.recorder.operator_count

    def begin_iteration(self) -> None:
        """Begin the next iteration, with its forward pass."""
        self.recorder.phases.begin_iteration()

    def begin_generation(self) -> None:
        """Begin the next iteration, which generates, with its ``prefill``."""
        self.recorder.phases.begin_iteration("prefill")
        self.recorder.phases.begin_generation()

    def enter(self, stage: str) -> None:
        """Begin another stage of the iteration."""
        self.recorder.phases.enter(stage)

    def label_model(self, model: torch.nn.Module) -> None:
        """Parameters and buffers of ``model`` are known by name from now on."""
        self.watch.adopt(model)

    def label_inputs(self, inputs: object, name: str = "input") -> None:
        """Tensors anywhere in ``inputs`` are the step's inputs."""
        for path, tensor in named_tensors(inputs, name):
            self.recorder.storages.label(tensor, Category.INPUT, path)


@contextlib.contextmanager
def _named_version() -> Iterator[None]:
    """An error for want of something in PyTorch names its version."""
    try:
        yield
    except Exception as error:
        message = torch_names.explained(error)
        if message is None:
            raise
        raise CaptureError(message) from error


@contextlib.contextmanager
def _apart(recorder: Recorder) -> Iterator[None]:
    """Modules that run in the middle of a step find PyTorch as it was before."""
    with recorder.paused(), disable_current_modes(), Patches.lifted():
        yield


@_named_version()
def capture(
    run: Callable[[Session], None],
    *,
    source: str,
    device: Device,
    torch_version: tuple[int, int],
    record_graph: bool = False,
    cudnn_workspaces: bool = True,
    cudnn: Cudnn | None = None,
    processes: Processes | None = None,
    post: Post | None = None,
    data_dependent: float | None = None,
    assume: Assumptions = (),
    budget: Budget | None = None,
    asked: set[str] | None = None,
    leave_after: Steps | None = None,
    mode: RunMode | None = None,
    memory: DeviceMemory | None = None,
    own_settings: bool = True,
    calls: CallLog | None = None,
) -> Run:
    """Run ``run`` on fake tensors of the pretended ``device`` and record it.

    ``data_dependent`` is the share of candidates that ``nonzero``, boolean masks and ``unique`` select where it is not
    known; None for all. ``assume``: the values that lines read; ``budget`` how much of host tensors is real.
    ``cudnn_workspaces=False`` stands for a cuDNN whose plans need none, as in some recordings; ``cudnn`` is the one to
    ask for the plans of convolutions, which are predicted without one. ``asked`` is filled with the facts of the card
    that the step's own code read. After the steps of ``leave_after`` the loops of a program are over. ``memory``
    answers its questions about memory, and refuses requests beyond it. Where the step dropped objects that another loop
    holds, the run of that one is the run's ``other_loop``. ``calls`` notes the calls of kernels' rules.

    A capture in another thread is waited for. Raises :class:`CaptureError` inside a capture of this thread, and when
    the step needs data that fake tensors do not have; errors of the user's own code come through as
    :class:`CaptureError` too, with the line that raised.
    """
    card = Card(device, torch_version, cudnn_workspaces=cudnn_workspaces, cudnn=cudnn)
    builder = TraceBuilder(source)
    graph = None
    if record_graph:
        from graphmem.capture.record.fx_graph import GraphRecorder

        graph = GraphRecorder()
    measured, is_rocm = device.cublas_workspace_bytes, device.vendor == "AMD"
    workspaces = Workspaces(device.limits, torch_version, measured_bytes=measured, is_rocm=is_rocm)
    assumed_values = AssumedValues(assume)
    selection = Selection(data_dependent, assumed_values)
    recorder = Recorder(builder, card, workspaces, graph, selection, KnownValues(budget), assumed_values)
    recorder.post = post
    if calls is not None:
        calls.begin(builder)
        recorder.births.calls = calls
    shown_card = ShownCard(device, set() if asked is None else asked)
    mode = mode or RunMode()
    context = Context(shown_card, recorder, processes, leave_after, mode.shortens, mode.ends_alike_loops, mode.opens)
    interrupts = Interrupts()
    with interrupts.held(), contextlib.ExitStack() as stack:
        _pretend(context, stack, interrupts)
        if memory is not None:
            recorder.answer_from(memory)
        settings = ProgramSettings(recorder, torch_version, are_followed=own_settings)
        garbage = Garbage(recorder.storages)
        with readable_errors(recorder), interrupts.let_in(), garbage.noted():
            run(Session(recorder, context.watch, context.leaving))
        if settings.differ:
            shown_card.asked.add("allocator")
        compiled = context.compiled
        assumed = _assumptions(recorder) | (compiled.assumed if compiled is not None else {})
        refusals = tuple(recorder.storages.refusals)
        found: dict[str, Any] = {}
        if context.leaving is not None:
            assumed |= context.leaving.findings()
            found |= _of_loops(context.leaving, recorder)
            builder.garbage_bytes = garbage.most_bytes
        if (groups := recorder.process_groups) is not None:
            on_node = processes.on_node if processes is not None else _on_node()
            found |= {"groups": tuple(groups.ranks.values()), "communicators": groups.communicators(on_node)}
        # The references of the step die here, while the recorder no longer listens.
        recorder.stop()
    builder.predicted_plans = len(card.predicted)
    trace = builder.build()
    captured = Run(
        trace,
        notes=(*(compiled.notes() if compiled is not None else ()), *recorder.notes),
        assumed=assumed,
        decided=dict(assumed_values.named),
        refusals=tuple(_caught(refusals, trace)),
        installed_version=version_of(torch.__version__),
        cudnn=cudnn,
        graph=graph.graph if graph is not None else None,
        optimizer=recorder.optimizers[0] if recorder.optimizers else "",
        sharded=recorder.sharded,
        **found,
    )
    held = _of_holding_loop(recorder, shown_card, trace)
    return captured if held is None else replace(captured, other_loop=replace(captured, trace=held))


def _pretend(context: Context, stack: contextlib.ExitStack, interrupts: Interrupts) -> None:
    """Begin a capture of this thread, with all layers that serve it. Closing the ``stack`` ends it."""
    stack.enter_context(numbered(*cards_of(context.processes, os.environ)))
    threads = stack.enter_context(capturing(interrupts.check))
    stack.callback(Patches.undo_all, threads)
    stack.enter_context(neutral_state())
    stack.enter_context(deferred.running(lambda: _apart(context.recorder)))
    layers = [layer for layer in LAYERS if layer.serves(context)]
    for layer in layers:
        if not layer.waits(context):
            layer.function()  # imported before names are replaced, which files remember
    for layer in layers:
        layer.enter(context, stack)


def _of_loops(leaving: Leaving, recorder: Recorder) -> dict[str, Any]:
    """The facts of a program's loops, as fields of its run; what the loops hold has its labels then."""
    from graphmem.capture.program.held import label_held

    label_held(recorder)
    return {
        "items": tuple(leaving.runs),
        "epochs": tuple(leaving.epochs.read),
        "left_in": leaving.left_in,
        "gone_on_in": leaving.gone_on_in,
    }


def _on_node() -> int | None:
    """Processes of a machine by the environment of a launcher; None where there is none."""
    cards, _ = cards_of(None, os.environ)
    return cards if cards > 1 else None


#: Facts of memory that a program may ask for, and that differ with the objects that a loop holds.
_FACTS_OF_MEMORY = frozenset({"allocator", "free_bytes"})


def _of_holding_loop(recorder: Recorder, shown_card: ShownCard, trace: Trace) -> Trace | None:
    """The trace of the loop that holds, where no answer to the run could have differed in it."""
    if recorder.both is None or recorder.storages.refusals or recorder.values.exceeded:
        return None
    return None if shown_card.asked & _FACTS_OF_MEMORY else recorder.both.of_holding_loop(trace)


def _caught(refusals: Iterable[Refusal], trace: Trace) -> Iterator[Diagnostic]:
    """Who was refused memory, and how much: one for every line of the program."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for refusal in refusals:
        operator = trace.operators[refusal.operator]
        place = operator.source or operator.module or "graphmem's loop"
        by_place.setdefault((place, operator.name), []).append(trace.storages[refusal.storage].bytes)
    for (place, name), sizes in by_place.items():
        least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
        times = "once" if len(sizes) == 1 else f"{len(sizes)} times"
        asked = most if least == most else f"{least} to {most}"
        yield Code.REFUSED.about(place=place, operator=name, times=times, asked=asked)


def _assumptions(recorder: Recorder) -> dict[Diagnostic, int]:
    """The assumptions of a capture -> how often each was made."""
    selection = recorder.selection
    assumed = dict(recorder.assumed + recorder.attribution.assumed)
    logged, values = recorder.assumed_values.logged, recorder.values
    if logged:
        assumed[Code.ONLY_LOGGED.about()] = logged
    for line in recorder.assumed_values.unused():
        assumed[Code.ASSUMPTION_UNUSED.about(place=line)] = 1
    if values.exceeded:
        assumed[Code.HOST_BUDGET.about()] = values.exceeded
    if values.guessed_draws:
        assumed[Code.HOST_DRAWS.about()] = values.guessed_draws
    if selection.assumed and selection.share is not None:
        is_all = selection.share >= 1
        share = Code.ALL_SELECTED.about() if is_all else Code.SHARE_SELECTED.about(share=selection.share)
        assumed[share] = selection.assumed
    if selection.distinct:
        assumed[Code.SPARSE_INDICES.about()] = selection.distinct
    assumed |= dict.fromkeys((Code.NAME_GONE.about(path=one.path, lost=one.lost) for one in absences()), 1)
    unmodelled = collections.Counter[Diagnostic]()
    ran = {re.split(r"[\\/]", operator.source)[0] for operator in recorder.builder.operators}
    for one, count in recorder.unmodelled.items():
        unmodelled[_weighed(one, ran)] += count
    return assumed | dict(sorted(unmodelled.items(), key=lambda found: found[0].message))


def _weighed(one: Diagnostic, ran: Container[str]) -> Diagnostic:
    """A library that finds no Triton, and of which no operator ran, is not on the path that was taken."""
    if one.code is Code.TRITON_MISSING and one.place not in ran:
        return Code.OPTIONAL_MISSING.about(importer=one.place, package="triton")
    return one


@contextlib.contextmanager
def readable_errors(recorder: Recorder) -> Iterator[None]:
    """Errors of a step in words. Raises :class:`CaptureError`."""
    try:
        yield
    except GraphmemError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = recorder.current_source()
        operator = getattr(error, "func", "an operator")
        raise CaptureError(
            f"{where}: {operator} needs the values of a tensor, and an analysis has only shapes; replace it by an "
            "operator of a fixed size for the analysis"
        ) from None
    except UnsupportedOperatorException as error:
        reason = explained(error) or (
            f"operator {error.func} has no fake implementation, so its outputs' shapes are unknown; register one with "
            "torch.library.register_fake, or choose the model's PyTorch implementation of it"
        )
        raise CaptureError(f"{recorder.current_source()}: {reason}") from None
    except Exception as error:
        if torch_names.explained(error) is not None:
            raise
        where = raised_at(error) or getattr(error, "place", "") or recorder.current_source()
        if speaks_of_memory(error) and recorder.storages.refusals:
            raise ProgramOutOfMemory(f"{where}: {said(error).partition(' GPU 0 has')[0]}") from error
        known = explained(error)
        if known is not None:
            raise CaptureError(f"{where}: {known}") from error
        raise CaptureError(f"{where}: the step raised {said(error)}") from error


def speaks_of_memory(error: BaseException | None) -> bool:
    """True if an error is PyTorch's of memory, or was raised because of one."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def raised_by_program(error: Exception) -> str | None:
    """Place and message of an error of a whole program, in one line; None for an error of the analysis."""
    ours = (GraphmemError, DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    if isinstance(error, ours) or explained(error) is not None or torch_names.explained(error) is not None:
        return None
    where = raised_at(error)
    return f"{where}{': ' if where else ''}{said(error)}"


def named_tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists and dicts, with a path for people."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, str(key) if name == "input" else f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{position}]")
