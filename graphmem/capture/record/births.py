"""Writes the allocations of one operator into the trace: outputs, buffers of its kernel, workspaces of libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.parts.script import BoundRule, Card, Script
from graphmem.capture.record.attribution import OperatorCall
from graphmem.capture.record.calls import CallLog, NotedCall
from graphmem.capture.record.cublas_workspaces import NOTHING, Workspaces, WorkspaceUse
from graphmem.capture.record.fx_graph import GraphRecorder
from graphmem.capture.record.storages import Storages
from graphmem.capture.torch_internals import on_engine_thread
from graphmem.capture.values.tensors import on_device, tensors_in
from graphmem.trace import Category, EventKind

_CLONE = torch.ops.aten.clone.default


class Births:
    """Writes one operator's allocations, in the order of a CUDA build. ``graph`` gets the operator too, if given."""

    def __init__(self, storages: Storages, card: Card, workspaces: Workspaces, graph: GraphRecorder | None) -> None:
        self.graph = graph
        self._storages = storages
        self._cards = {
            (captured, backward): card.used(in_graph_capture=captured, in_backward=backward)
            for captured in (False, True)
            for backward in (False, True)
        }
        self._workspaces = workspaces
        self._kept_workspaces: dict[int, list[int]] = {}  # stream -> storages of cuBLAS workspaces
        self.calls: CallLog | None = None  # notes the calls of rules, for a template

    def record(self, call: OperatorCall, out: object) -> None:
        """The operator has returned ``out``. Raises ``torch.OutOfMemoryError`` where the card would; then nothing of it
        stays but the workspaces that cuBLAS keeps."""
        first_row = len(self._storages.builder.rows)
        try:
            self._record(call, out, first_row)
        except torch.OutOfMemoryError:
            kept = [index for indices in self._kept_workspaces.values() for index in indices]
            self._storages.unborn(first_row, kept)
            self._workspaces.keep_only([self._storages.builder.labels[index] for index in kept])
            raise

    def _record(self, call: OperatorCall, out: object, first_row: int) -> None:
        """Record the memory that a call takes, in rows from ``first_row`` on: by the script of its rule where it has
        one, else each output as it is; then the workspaces of cuBLAS."""
        if self.graph is not None:
            self._draw(self.graph, call, out)
        storages, facts = self._storages, call.facts
        outputs = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
        script = None
        rule = call.rule if call.rule is not None and (on_device(outputs) or on_device(call.args)) else None
        if rule is not None:
            card = self._cards[storages.pools.in_capture, call.in_backward]
            script = rule(call.args, call.kwargs, outputs, card)
        workspaces = NOTHING
        if facts.calls_cublas and on_device(outputs):
            on_engine = call.in_backward and on_engine_thread()
            workspaces = self._workspaces.use(call.func, call.args, call.kwargs, on_engine, storages.streams.current)
        if script is None:
            reserve = self._copied_reserve(call.args[0]) if call.func is _CLONE else None
            for tensor in outputs:
                storages.see(tensor, reserve)
        else:
            self._follow(script, outputs, workspaces)
            workspaces = NOTHING
        if facts.resizes:
            storages.resized(call.args[0].untyped_storage())
        if workspaces is not NOTHING:
            self._take(workspaces)
        if self.calls is not None and rule is not None and self.calls.builder is storages.builder:
            self._note(self.calls, call, rule, outputs, script, card, first_row)

    def _note(
        self, calls: CallLog, call: OperatorCall, rule: BoundRule, outputs: Sequence[Any],
        script: Script | None, card: Card, first_row: int,
    ) -> None:  # fmt: skip
        """Note a call of a rule, whose events are in the trace from ``first_row`` on."""
        storages = self._storages
        rows = storages.builder.rows[first_row:]
        new = {row[1] for row in rows if row[0] == EventKind.ALLOC}
        found = {number: storages.of(tensor) for number, tensor in enumerate(outputs)}
        born = {ref.index: number for number, ref in reversed(found.items()) if ref is not None and ref.index in new}
        stream = storages.streams.current
        noted = NotedCall(
            operator=call.facts.name,
            index=storages.operator,
            rule=rule,
            rows=(first_row, first_row + len(rows)),
            born=tuple((number, index) for index, number in sorted(born.items())),
            place=(stream, storages.pools.number_now(stream)),
            script=script,
            state=(card.in_graph_capture, card.in_backward),
        )
        calls.note(noted, (call.args, call.kwargs, outputs), card)

    def _copied_reserve(self, buffer: torch.Tensor) -> int | None:
        """Bytes of a copy of a buffer that shows no values: a backward pass that keeps its graph (``retain_graph``)
        gives cuDNN a copy of the reserve (``retain_variables``, tools/autograd/derivatives.yaml), whose size a rule
        knows and no fake tensor."""
        if buffer.layout is not torch.strided or buffer.untyped_storage().nbytes():
            return None
        source = self._storages.of(buffer)
        return None if source is None else self._storages.builder.storage_bytes[source.index]

    def clear_workspaces(self, stream: int | None = None) -> None:
        """The cuBLAS workspaces of a stream, or all, are given back."""
        for kept in list(self._kept_workspaces) if stream is None else [stream]:
            for index in self._kept_workspaces.pop(kept, ()):
                self._storages.builder.free(index, self._storages.operator)
        self._workspaces.forget(stream)

    def _draw(self, graph: GraphRecorder, call: OperatorCall, out: object) -> None:
        storages = self._storages
        operator = storages.builder.operators[storages.operator]
        meta = {
            "operator": storages.operator,
            "module": operator.module,
            "source": operator.source,
            "phase": str(storages.builder.phases[operator.phase]),
        }
        graph.record(call.func, call.args, call.kwargs, out, meta)

    def _follow(self, script: Script, outputs: Sequence[object], workspaces: WorkspaceUse) -> None:
        """Libraries take their ``workspaces`` when they are called, before the operator gives anything back."""
        storages = self._storages
        taken: dict[int, int] = {}
        mentioned = set()
        for step in script.steps:
            if step.kind == "output":
                mentioned.add(step.index)
                storages.see(outputs[step.index], step.bytes)
            elif step.kind == "take":
                taken[step.index] = storages.take(step)
            elif step.kind == "product":
                self._take(self._workspaces.use_cublas(on_engine_thread(), storages.streams.current))
            elif step.kind == "empty_cache":
                storages.builder.event(EventKind.EMPTY_CACHE, storages.operator)
            else:
                self._take(workspaces)
                workspaces = NOTHING
                storages.builder.free(taken[step.index], storages.operator)
        for index, tensor in enumerate(outputs):
            if index not in mentioned:
                storages.see(tensor)
        self._take(workspaces)

    def _take(self, use: WorkspaceUse) -> None:
        """Record the workspaces of cuBLAS: those that stay, and a temporary one, freed again, for each product."""
        storages = self._storages
        for call in range(use.times):
            kept = use.kept if call == 0 else ()
            if use.kept_before:
                self._keep(kept)
            around = None
            if use.temporary is not None:
                label, size = use.temporary
                around = storages.alloc(size, Category.WORKSPACE, label)
            if not use.kept_before:
                self._keep(kept)
            if around is not None:
                storages.builder.free(around, storages.operator)

    def _keep(self, workspaces: Sequence[tuple[str, int]]) -> None:
        storages = self._storages
        for label, size in workspaces:
            index = storages.alloc(size, Category.WORKSPACE, label)
            self._kept_workspaces.setdefault(storages.streams.current, []).append(index)
