"""Records a PyTorch step run on fake tensors: every operator, and the birth and death of every storage, in order.

PyTorch itself executes the step (autograd, Python references, views, in-place operators, hooks, recomputation), so
lifetimes are exact. What a CUDA build would do otherwise than the fake run is laid over it here: hidden kernel buffers
(``capture.kernels``), library workspaces (``cublas_workspaces``) and the engine's in-place gradient fan-in.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphmem.capture.kernels import rule_of
from graphmem.capture.kernels.parts.script import BoundRule, Card, Script
from graphmem.capture.kernels.parts.unknown import unmodelled
from graphmem.capture.operators import sparse
from graphmem.capture.operators.collectives import (
    COLLECTIVES,
    MAKES_HOST_VALUES,
    collective,
    flat_copy_bytes,
    is_bookkeeping,
)
from graphmem.capture.operators.composites import FUSED_ON_CUDA
from graphmem.capture.operators.fused_optimizer_steps import FUSED_STEPS
from graphmem.capture.operators.in_place_gradients import IN_PLACE_IN_BACKWARD
from graphmem.capture.operators.made_of_operators import BODIES
from graphmem.capture.operators.output_layouts import RELAID, as_on_card
from graphmem.capture.operators.selecting import SELECTING, outputs_of
from graphmem.capture.record.cublas_workspaces import GEMMS, NOTHING, Workspaces, WorkspaceUse
from graphmem.capture.record.fan_in import FanIn
from graphmem.capture.record.storages import Storages
from graphmem.capture.values import device_values, host_values
from graphmem.capture.values.callers import called_by_engine, node_name, user_line
from graphmem.capture.values.selection import Selection
from graphmem.capture.values.tensors import tensors_in
from graphmem.errors import CaptureError
from graphmem.trace import Category, EventKind, Place, TraceBuilder

_aten = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default
_ADD = _aten.add.Tensor
_ADD_NAME = str(_ADD)
_DETACH = _aten.detach.default
_CLONE = _aten.clone.default
_RESIZERS = {_aten.resize_.default, _aten.resize_as_.default, _aten.set_.source_Tensor}

_ITEM = _aten._local_scalar_dense.default
#: What a subscript calls: the second argument is a list of indices.
_SUBSCRIPTS = {_aten.index.Tensor, _aten.index_put_.default}
#: Answers about whole tensors that are one Python value.
_DECISIONS = {_ITEM, _aten.equal.default, _aten.allclose.default}


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode above ``FakeTensorMode`` that fills a :class:`TraceBuilder`.

    ``composites`` are CUDA's versions of composite operators, needed where inference mode keeps the dispatcher from
    applying them (:mod:`graphmem.capture.operators.composites`).
    """

    def __init__(
        self,
        builder: TraceBuilder,
        card: Card,
        workspaces: Workspaces,
        graph: Any | None = None,
        selection: Selection | None = None,
    ) -> None:
        super().__init__()
        self.storages = Storages(builder)
        self.streams = self.storages.streams
        self.card = card
        self._captured_card = replace(card, in_graph_capture=True)
        self.workspaces = workspaces
        self.composites: dict[Any, Callable[..., Any]] = {}
        self.graph = graph
        self.selection = selection or Selection(None)
        self.values_assumed = 0
        self.unmodelled: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()
        self.module_depth = 0
        self.in_optimizer_step = False
        self._known: dict[Any, tuple[str, BoundRule | None, str | None]] = {}
        self._module = ""
        self._by_sequence: dict[int, tuple[str, str]] = {}
        self._phase = builder.phase(0, "build")
        self._iteration = 0
        self._stage = "build"
        self.fan_in = FanIn()
        self._kept_workspaces: dict[int, list[int]] = {}  # stream -> storages of cuBLAS workspaces
        self.notes: list[str] = []  # remarks for the reader
        self._paused = False
        self.wrappers: set[type] = set()  # tensors around others, as DTensor
        self._first_gradient: int | None = None  # while gradients are computed: the first storage that is one
        self._node_start = (-1, 0)  # sequence number of the backward node, storages before it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around ``__torch_dispatch__``: nothing is compiled here, and the wrapper costs time."""
        return False

    @property
    def builder(self) -> TraceBuilder:
        """Where the trace is being written."""
        return self.storages.builder

    @builder.setter
    def builder(self, builder: TraceBuilder) -> None:
        self.storages.builder = builder

    # --- phases -------------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """What follows belongs to the next iteration, starting with its forward pass."""
        self._iteration += 1
        self.enter("forward")

    def enter(self, stage: str) -> None:
        """Name the stage (``forward``, ``backward``, ``optimizer``) of what follows."""
        self._stage = stage
        self.storages.born_as = Category.ACTIVATION if stage == "forward" else Category.TEMPORARY
        self._phase = self.builder.phase(self._iteration, stage)
        self.storages.operator = self.builder.operator(f"({stage})", phase=self._phase)

    def begin_backward(self) -> None:
        """A backward pass begins. Steps without any module have not said that their iteration began."""
        if self.fan_in.calibrating:
            return
        if self._stage == "build" or (self._stage == "optimizer" and not self.in_optimizer_step):
            self.begin_iteration()
        if self._stage == "forward":
            self.enter("backward")

    @property
    def stage(self) -> str:
        """The current stage: ``build``, ``forward``, ``backward`` or ``optimizer``."""
        return self._stage

    @property
    def operator_count(self) -> int:
        """How many operators have been recorded."""
        return len(self.builder.operators)

    @property
    def iteration(self) -> int:
        """Number of the current iteration, 0 while building."""
        return self._iteration

    def current_source(self) -> str:
        """The source line, module or name of the operator that ran last; for error messages."""
        operator = self.builder.operators[self.storages.operator]
        return operator.source or operator.module or operator.name

    def allocator_event(self, name: str) -> None:
        """The step synchronised the device (``synchronize``) or emptied the cache (``empty_cache``)."""
        kind = EventKind.EMPTY_CACHE if name == "empty_cache" else EventKind.SYNCHRONIZE
        if kind is EventKind.SYNCHRONIZE:
            self._refuse_in_graph_capture("the device is synchronized")
        self.builder.event(kind, self.storages.operator)

    def _refuse_in_graph_capture(self, what: str, tensor: torch.Tensor | None = None) -> None:
        if self.storages.pools.in_capture and (tensor is None or _on_device([tensor])):
            raise CaptureError(f"{self.current_source()}: {what} while a CUDA graph is captured, which CUDA refuses")

    def stop(self) -> None:
        """Stop listening: what dies from now on was alive at the end of the run."""
        self.storages.forget()
        self.builder = TraceBuilder("after the end")
        self.storages.operator = self.builder.operator("(end)")

    def set_module(self, path: str) -> None:
        """Path of the module whose ``forward`` runs now."""
        self._module = path

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _PRIM_DEVICE:
            return func(*args, **(kwargs or {}))
        if self._paused:
            return func(*args, **(kwargs or {}))
        if self.wrappers and not self.wrappers.isdisjoint(types):
            return NotImplemented  # it unwraps its tensors, and the operators on them come here
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            return self._pinned(func, args, kwargs)
        if func in COLLECTIVES:
            self._begin_operator(str(func), args, torch._C._current_graph_task_id() != -1)
            self.storages.take_and_give(
                flat_copy_bytes(func, args), Category.COMMUNICATION, "flat copy of a collective's list"
            )
            return collective(func, args)
        bookkeeping = func in MAKES_HOST_VALUES and is_bookkeeping(kwargs)
        if bookkeeping or host_values.computable(func, args, kwargs):
            return host_values.compute(func, args, kwargs)
        if torch.is_inference_mode_enabled():
            decomposed = self._decompose(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        known = self._known.get(func)
        if known is None:
            name = str(func)
            rule = rule_of(name)
            known = self._known[func] = (name, rule, unmodelled(name, rule is not None))
        name, rule, hidden = known
        if hidden is not None and _on_device(args):
            self.unmodelled[f"{name}: {hidden}"] += 1
        in_backward = torch._C._current_graph_task_id() != -1
        self._begin_operator(name, args, in_backward)
        sparse_body = sparse.body_of(func, args)
        if in_backward:
            if func is _ADD and self.fan_in.adds_in_place(args, kwargs):
                return args[0]
            if (func is _DETACH or func is _CLONE) and sparse_body is None:
                out = func(*args, **kwargs)
                self._record(func, out, args, kwargs, rule, in_backward)
                self._mark_accumulated(out)
                return out
            if func in IN_PLACE_IN_BACKWARD:
                func = self._in_place_on_card(func, args)
        elif func in _DECISIONS:
            value = self._read_back(func, args[0])
            if value is not None:
                return value
        if func in _SUBSCRIPTS:
            self.storages.see_lists(args[1])
        body = sparse_body or BODIES.get(func)
        if body is not None and (_on_device(args) or self.selection.share is not None):
            with self:
                out = body(self.selection, *args, **kwargs)
            if out is not NotImplemented:
                return out
        out = outputs_of(func, self.selection, args, kwargs) if func in SELECTING else None
        if out is None and func not in FUSED_STEPS:
            out = func(*args, **kwargs)
            if func in RELAID:
                out = as_on_card(func, args, out)
        self._record(func, out, args, kwargs, rule, in_backward)
        if func in device_values.TRACKED:
            remark = device_values.follow(func, args, out)
            if remark:
                self.assumed[remark] += 1
        return out

    def _pinned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor in pinned host memory, which a build without a device could not make."""
        self._begin_operator(str(func), args, torch._C._current_graph_task_id() != -1)
        out = func(*args, **{**kwargs, "pin_memory": False})
        self.storages.see(out, place=Place.PINNED)
        out._graphmem_pinned = True
        return out

    def _read_back(self, func: Any, tensor: Any) -> Any:
        """What reading a tensor's data gives; None where the step must not go on without them."""
        self._refuse_in_graph_capture("a tensor's value is read back", tensor)
        value = device_values.known(tensor) if func is _ITEM else None
        if value is None and device_values.is_validation(tensor):
            self.assumed[device_values.VALID] += 1
            return True
        if value is not None or (self.module_depth and self.selection.share is None):
            return value
        device_values.refuse_decisions()
        if self.module_depth:
            self.assumed[device_values.ASSUMED_IN_MODEL] += 1
        else:
            self.values_assumed += 1
        return device_values.assumed(tensor) if func is _ITEM else False

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """In inference mode composite operators arrive whole; run what they are made of."""
        substitute = self.composites.get(func)
        if substitute is not None and _on_device(args):
            with self:
                return substitute(*args, **kwargs)
        if func in FUSED_ON_CUDA or not func._can_decompose():
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def _begin_operator(self, name: str, args: Any, in_backward: bool) -> None:
        builder = self.builder
        if in_backward:
            if self._stage != "backward":
                self.begin_backward()
            module, source = self._module, ""
            node = torch._C._current_autograd_node()
            if node is not None:
                sequence = node._sequence_nr()
                module, source = self._by_sequence.get(sequence, (module, ""))
                if sequence != self._node_start[0]:
                    self._node_start = (sequence, len(builder.storage_bytes))
        if not in_backward or self.module_depth:  # a module that runs in the backward pass is being recomputed
            module = self._module
            source = user_line()
            if torch.is_grad_enabled():
                # The first operator after a node was made is the one it belongs to; later ones may make no node.
                self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, (module, source))
                self.streams.note_forward(torch.autograd._get_sequence_nr() - 1, args)
        self.storages.operator = builder.operator(name, module, self._phase, source)
        if self.streams.used:
            self._gradients_change_stream(name, args, in_backward)

    def _gradients_change_stream(self, name: str, args: Any, in_backward: bool) -> None:
        """The engine calls ``record_stream`` on a gradient that a node on another stream will use
        (torch/csrc/autograd/input_buffer.cpp)."""
        storages = self.builder.storage_bytes
        if not in_backward:
            self._first_gradient = None
            return
        if self._first_gradient is None:
            self._first_gradient = len(storages) - 1  # the one of the loss, made just before
        end = self._node_start[1]
        if name == _ADD_NAME and called_by_engine():
            self.streams.add_gradients(args[0])
            end = len(storages)
        for tensor in tensors_in(args):
            ref = self.storages.of(tensor) if tensor.layout is torch.strided else None
            if ref is None or not self._first_gradient <= ref.index < end:
                continue
            if self.builder.streams[ref.index] != self.streams.current:
                self.storages.record_stream(tensor, self.streams.current)

    # --- births and deaths --------------------------------------------------------------------------------------------

    def _record(self, func: Any, out: Any, args: Any, kwargs: Any, rule: BoundRule | None, in_backward: bool) -> None:
        if self.graph is not None:
            operator = self.builder.operators[self.storages.operator]
            meta = {
                "operator": self.storages.operator,
                "module": operator.module,
                "source": operator.source,
                "phase": str(self.builder.phases[operator.phase]),
            }
            self.graph.record(func, args, kwargs, out, meta)
        outputs = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
        script = None
        if rule is not None and (_on_device(outputs) or _on_device(args)):
            card = self._captured_card if self.storages.pools.in_capture else self.card
            script = rule(args, kwargs, outputs, card)
        workspaces = NOTHING
        if func in GEMMS and _on_device(outputs):
            workspaces = self.workspaces.use(func, args, in_backward, self.streams.current)
        if script is None:
            for tensor in outputs:
                self.storages.see(tensor)
        else:
            self._follow(script, outputs, workspaces, in_backward)
            workspaces = NOTHING
        if func in _RESIZERS:
            self.storages.resized(args[0].untyped_storage())
        self._take_workspaces(workspaces)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in this context is no part of the step, and leaves no tensor behind."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _follow(self, script: Script, outputs: Sequence[Any], workspaces: WorkspaceUse, in_backward: bool) -> None:
        """Libraries take their ``workspaces`` when they are called, before the operator gives anything back."""
        taken: dict[int, int] = {}
        mentioned = set()
        for step in script.steps:
            if step.kind == "output":
                mentioned.add(step.index)
                self.storages.see(outputs[step.index], step.bytes)
            elif step.kind == "take":
                taken[step.index] = self.storages.alloc(step.bytes or 0, Category.TEMPORARY, step.label)
            elif step.kind == "product":
                self._take_workspaces(self.workspaces.use_cublas(in_backward, self.streams.current))
            elif step.kind == "empty_cache":
                self.builder.event(EventKind.EMPTY_CACHE, self.storages.operator)
            else:
                self._take_workspaces(workspaces)
                workspaces = NOTHING
                self.builder.free(taken[step.index], self.storages.operator)
        for index, tensor in enumerate(outputs):
            if index not in mentioned:
                self.storages.see(tensor)
        self._take_workspaces(workspaces)

    def _take_workspaces(self, use: WorkspaceUse) -> None:
        around = None
        if use.temporary:
            around = self.storages.alloc(use.temporary, Category.WORKSPACE, "cublasLt workspace")
        for label, size in use.kept:
            index = self.storages.alloc(size, Category.WORKSPACE, label)
            self._kept_workspaces.setdefault(self.streams.current, []).append(index)
        if around is not None:
            self.builder.free(around, self.storages.operator)

    def clear_workspaces(self, stream: int | None = None) -> None:
        """The cuBLAS workspaces of a stream, or all, are given back."""
        for kept in list(self._kept_workspaces) if stream is None else [stream]:
            for index in self._kept_workspaces.pop(kept, ()):
                self.builder.free(index, self.storages.operator)
        self.workspaces.forget(stream)

    def _mark_accumulated(self, out: Any) -> None:
        """A detach or clone made by ``AccumulateGrad`` is the parameter's gradient."""
        if node_name() == "AccumulateGrad":
            self.storages.label(out, Category.GRADIENT)

    # --- gradient fan-in ----------------------------------------------------------------------------------------------

    def calibrate(self) -> None:
        """Let the fan-in learn how this build of PyTorch counts references."""
        builder, self.builder = self.builder, TraceBuilder("calibration")
        graph, self.graph = self.graph, None
        self.storages.operator = self.builder.operator("(calibration)")
        self.fan_in.calibrate()
        self.builder, self.graph = builder, graph
        self.storages.operator = 0

    def _in_place_on_card(self, func: Any, args: Any) -> Any:
        """What a formula of gradients calls on a card, where it may overwrite a tensor that it has just made."""
        in_place, nodes = IN_PLACE_IN_BACKWARD[func]
        if node_name() not in nodes or torch.is_grad_enabled():
            return func
        ref = self.storages.of(args[0])
        made_here = ref is not None and ref.index >= self._node_start[1]
        return in_place if made_here and called_by_engine() else func


def _on_device(values: Any) -> bool:
    return any(isinstance(t, FakeTensor) and t.fake_device.type == "cuda" for t in tensors_in(values))
