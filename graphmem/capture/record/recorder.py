"""The book of a run: its phases, its operators, and their allocations.

PyTorch itself executes the step on fake tensors (autograd, Python references, views, in-place operators, hooks,
recomputation), so lifetimes are exact. Differences of a CUDA build from the fake run are laid over it: by the
interceptors of :mod:`graphmem.capture.record.dispatch`, by hidden kernel buffers and workspaces (``births``), and by
the engine's in-place gradient fan-in.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from graphmem.base.textbook import Sharded
from graphmem.capture.device.pretend_device import device_of
from graphmem.capture.kernels.parts.known import is_exact, layout_of
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.ports import DeviceMemory
from graphmem.capture.record.attribution import Attribution, OperatorCall
from graphmem.capture.record.births import Births
from graphmem.capture.record.both_loops import BothLoops
from graphmem.capture.record.cublas_workspaces import Workspaces
from graphmem.capture.record.fx_graph import GraphRecorder
from graphmem.capture.record.gradient_references import FanIn, WrittenViews
from graphmem.capture.record.phases import Phases
from graphmem.capture.record.storages import Storages
from graphmem.capture.record.streams import Streams
from graphmem.capture.values.assumed_values import AssumedValues, Selection
from graphmem.capture.values.known_values import KnownValues
from graphmem.capture.values.messages import Post
from graphmem.capture.values.tensors import on_device, tensors_in
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError
from graphmem.trace import EventKind, TraceBuilder

if TYPE_CHECKING:
    from graphmem.capture.operators.collectives import ProcessGroups
    from graphmem.capture.record.collected import Collected


class Recorder:
    """Fills a :class:`TraceBuilder` with the operators from :class:`graphmem.capture.record.dispatch.RecordingMode`.

    ``composites`` are CUDA's versions of composite operators, needed where inference mode keeps the dispatcher from
    applying them (:mod:`graphmem.capture.operators.composites`).
    """

    def __init__(
        self,
        builder: TraceBuilder,
        card: Card,
        workspaces: Workspaces,
        graph: GraphRecorder | None = None,
        selection: Selection | None = None,
        values: KnownValues | None = None,
        assumed_values: AssumedValues | None = None,
    ) -> None:
        self.card: Card = card
        self.storages: Storages = Storages(builder)
        self.phases = Phases(self.storages)
        self.both: BothLoops | None = None  # filled by a default step that follows two loops
        self.streams: Streams = self.storages.streams
        self.attribution = Attribution(self.storages)
        self.births = Births(self.storages, card, workspaces, graph)
        self.composites: dict[Any, Callable[..., Any]] = {}
        self.assumed_values: AssumedValues = assumed_values or AssumedValues()
        self.selection = selection or Selection(None, self.assumed_values)
        self.fan_in = FanIn()
        self.written_views = WrittenViews()
        self.collected: Collected | None = None  # made for the first loop that is left early
        self.values: KnownValues = values or KnownValues()
        self.unmodelled: Counter[Diagnostic] = Counter()
        self.assumed: Counter[Diagnostic] = Counter()
        self.notes: list[str] = []  # remarks for the reader
        self.process_groups: ProcessGroups | None = None
        self.post: Post | None = None  # messages between the processes of a job
        self.on_forward: Callable[[Any, Any], None] | None = None  # called with the outermost module that is trained
        self.sharded: Sharded | None = None  # how the model that is trained is shared out
        self.optimizers: list[str] = []  # classes of those that stepped, in order
        self.wrappers: set[type] = set()  # tensors around others, as DTensor
        self.unwrapped_in_cpp: set[type] = set()  # those of them that PyTorch's C++ unwraps itself
        self.before_in_backward: Callable[[], None] | None = None  # called before each operator of a backward pass
        self.is_paused = False
        self.is_probing = False  # whether the record is a probe of a long generation, and thrown away

    @property
    def builder(self) -> TraceBuilder:
        """Where the trace is being written."""
        return self.storages.builder

    @builder.setter
    def builder(self, builder: TraceBuilder) -> None:
        self.storages.builder = builder

    def note_optimizer(self, name: str) -> None:
        """An optimizer of this class steps."""
        if name not in self.optimizers:
            self.optimizers.append(name)

    def note_once(self, remark: str) -> None:
        """Show the reader a remark, once."""
        if remark not in self.notes:
            self.notes.append(remark)

    @property
    def operator_count(self) -> int:
        """The number of operators recorded so far."""
        return len(self.builder.operators)

    def begin_backward(self) -> None:
        """A backward pass begins; those of a calibration are none of the step."""
        if not (self.fan_in.calibrating or self.written_views.calibrating):
            self.phases.begin_backward()

    def current_source(self) -> str:
        """The source line, module or name of the operator that ran last; for error messages."""
        operator = self.builder.operators[self.storages.operator]
        return operator.source or (f"module {operator.module}" if operator.module else operator.name)

    def allocator_event(self, name: str) -> None:
        """The step synchronised the device (``synchronize``) or emptied the cache (``empty_cache``)."""
        self.storages.settle()
        kind = EventKind.EMPTY_CACHE if name == "empty_cache" else EventKind.SYNCHRONIZE
        if kind is EventKind.SYNCHRONIZE:
            self.refuse_in_graph_capture("the device is synchronized")
        self.builder.event(kind, self.storages.operator)

    @property
    def groups(self) -> ProcessGroups:
        """The process groups on cards that this process is in, and their traffic."""
        if self.process_groups is None:
            from graphmem.capture.operators.collectives import ProcessGroups

            self.process_groups = ProcessGroups()
        return self.process_groups

    def collect_from(self, first: int) -> None:
        """A loop whose first storage is ``first`` was left early: its tensors on the host are a part of what it would
        have collected."""
        from graphmem.capture.record.collected import Collected

        self.collected = self.collected or Collected(self.storages)
        self.collected.begin(first)

    @property
    def memory(self) -> DeviceMemory | None:
        """The allocator that answers while the step runs."""
        return self.storages.memory

    def answer_from(self, memory: DeviceMemory) -> None:
        """Let ``memory`` answer for all operators recorded from the beginning on."""
        memory.follow(self.builder)
        self.storages.memory = memory

    def settle(self) -> None:
        """See :meth:`Storages.settle`."""
        if self.storages.error is not None:
            self.storages.settle()

    def memory_fraction(self, fraction: float) -> None:
        """The step limits itself to this part of the card's memory."""
        self.builder.memory_fraction(fraction, self.storages.operator)
        if self.memory is not None:
            self.memory.fraction_set(fraction)

    def allocator_settings(self, text: str) -> None:
        """The program gives PyTorch's allocator other settings, whatever it had."""
        self.builder.allocator_settings(text, self.storages.operator)
        self.note_once(f"the program gives the allocator the settings {text!r}")

    def refuse_in_graph_capture(self, what: str, tensor: torch.Tensor | None = None) -> None:
        """Raise :class:`CaptureError` if the current stream is captured; for a host ``tensor`` never."""
        if self.storages.pools.in_capture and (tensor is None or on_device(tensor)):
            raise CaptureError(f"{self.current_source()}: {what} while a CUDA graph is captured, which CUDA refuses")

    def stop(self) -> None:
        """Stop listening: a storage that dies from now on was alive at the end of the run."""
        self.storages.forget()
        self.storages.memory = None
        self.builder = TraceBuilder("after the end")
        self.storages.operator = self.builder.operator("(end)")

    # --- operators ----------------------------------------------------------------------------------------------------

    def note(self, call: OperatorCall) -> None:
        """An operator is called now."""
        phases = self.phases
        if call.in_backward:
            if phases.stage != "backward":
                self.begin_backward()
            if self.before_in_backward is not None:
                self.before_in_backward()
        self.attribution.note(call, phases.current)

    def before_each_in_backward(self, act: Callable[[], None]) -> None:
        """Call ``act`` before each operator of a backward pass from now on."""
        self.before_in_backward = act

    def count_unmodelled(self, call: OperatorCall) -> None:
        """Count an operator on the device that holds more than is modelled, or of which nobody knows."""
        remark = call.facts.remark
        if remark is None and call.facts.unproven_layouts:
            remark = _layout_remark(call)
        if remark is None or is_exact(call.facts.name, call.args):
            return
        if on_device((call.args, *call.kwargs.values())) or _names_device(call.kwargs):
            self.unmodelled[remark] += 1

    def enter_module(self, path: str) -> None:
        """A module's ``forward`` begins."""
        self.attribution.module_depth += 1
        self.attribution.module = path

    def leave_module(self, outer: str, *, was_entered: bool = True) -> None:
        """It has ended, and that of ``outer`` goes on ("": none)."""
        self.attribution.module_depth -= was_entered
        self.attribution.module = outer

    def clear_workspaces(self, stream: int | None = None) -> None:
        """The cuBLAS workspaces of a stream, or all, are given back."""
        self.births.clear_workspaces(stream)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose operators are no part of the step, and that leaves no tensor behind."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def calibrate(self) -> None:
        """Learn how this build of PyTorch counts references, once for as many as Python calls hold."""
        known = _LEARNT.get(held := _held_by_calls())
        if known is not None:
            self.fan_in.counts, self.written_views.counts = known
            return
        builder, self.builder = self.builder, TraceBuilder("calibration")
        graph, self.births.graph = self.births.graph, None
        self.storages.operator = self.builder.operator("(calibration)")
        self.fan_in.calibrate()
        self.written_views.calibrate()
        self.builder, self.births.graph = builder, graph
        self.storages.operator = 0
        _LEARNT[held] = self.fan_in.counts, self.written_views.counts


#: Counts of references that nobody else holds (:class:`FanIn`, :class:`WrittenViews`), by :func:`_held_by_calls`.
_LEARNT: dict[tuple[int, bool, bool], tuple[list[tuple[int, int, int]], dict[Any, tuple[int, int, int]]]] = {}


def _held_by_calls() -> tuple[int, bool, bool]:
    """How many references calls of Python functions hold to an argument: a frame evaluator, which ``torch.compile``
    sets, or a debugger changes that for the whole process."""

    def outer(argument: object) -> int:
        return inner(argument)

    def inner(argument: object) -> int:
        return sys.getrefcount(argument)

    return outer(object()), sys.gettrace() is None, sys.getprofile() is None


def _layout_remark(call: OperatorCall) -> Diagnostic | None:
    """The remark on an operator that is proven, but not for inputs that lie as these do."""
    for tensor in tensors_in((call.args, tuple(call.kwargs.values()))):
        if tensor.layout is torch.strided and on_device(tensor) and layout_of(tensor) in call.facts.unproven_layouts:
            return Code.LAYOUT_NOT_CHECKED.about(operator=call.facts.name)
    return None


def _names_device(kwargs: dict[str, object]) -> bool:
    """True if something is made on the device, of no tensors."""
    device = kwargs.get("device")
    return device is not None and device_of(device).type == "cuda"
