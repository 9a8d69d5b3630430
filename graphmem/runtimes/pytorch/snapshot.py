"""A trace, replayed by the simulated PyTorch allocator, as the pickle that ``torch.cuda.memory._dump_snapshot`` writes.

https://pytorch.org/memory_viz shows it, and ``graphmem replay`` reads it. The format is that of
``torch/csrc/cuda/Module.cpp`` (2.13): ``segments`` is the heap at the end, ``device_traces`` every event from the first
on. Times are the numbers of the events: an estimate has no clock. A block's ``frames`` name the operator that asked for
it, its module, and the source line.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import Block
from graphmem.allocators.pytorch_caching.views import as_snapshot
from graphmem.base.versions import version_named
from graphmem.replay import replay
from graphmem.runtimes.pytorch import runtime
from graphmem.trace import EventKind, Operator, Place, Trace

#: Version of pickle that every Python that runs PyTorch reads.
_PROTOCOL = 4

Interval = tuple[int, int]

#: What taking and giving back memory is called, of cudaMalloc and of expandable segments.
_SEGMENT_ACTIONS = {False: ("segment_alloc", "segment_free"), True: ("segment_map", "segment_unmap")}


def render(trace: Trace, alloc_conf: str | None = None, torch_version: str | None = None) -> bytes:
    """The snapshot as a pickle of plain values. Raises :class:`graphmem.errors.UsageError` for settings that PyTorch
    would refuse."""
    return pickle.dumps(snapshot(trace, alloc_conf, torch_version), protocol=_PROTOCOL)


def snapshot(trace: Trace, alloc_conf: str | None = None, torch_version: str | None = None) -> dict[str, Any]:
    """The same as a value, like the one ``torch.cuda.memory._snapshot()`` returns. Raises as :func:`render` does."""
    version = version_named(torch_version)
    text = runtime.configuration_text(alloc_conf, version)
    allocator = _Recording(trace, text, version)
    replay(trace, allocator)
    return {
        "segments": [as_snapshot(view) for view in allocator.segments()],
        "device_traces": [allocator.rows],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": text},
        "external_annotations": [],
    }


class _Recording(PyTorchCachingAllocator):
    """The caching allocator, noting every block and segment that it hands out or takes back."""

    def __init__(self, trace: Trace, text: str, version: tuple[int, int]) -> None:
        super().__init__(None, parse_alloc_conf(text, version), version)
        self.rows: list[dict[str, Any]] = []
        self._trace = trace
        self._allocations = self._operators(EventKind.ALLOC)
        self._frees = self._operators(EventKind.FREE)
        self._ranges: dict[bool, list[Interval]] = {}
        self._reserved = 0
        self._frames_of: dict[int, list[dict[str, Any]]] = {}

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        return self._allocated(super().malloc(size, stream), size, stream)

    def malloc_in_pool(self, size: int, stream: int, pool: int) -> Block | None:
        return self._allocated(super().malloc_in_pool(size, stream, pool), size, stream)

    def free(self, handle: Block | None) -> None:
        frames = self._frames(next(self._frees))
        if handle is not None:
            for action in ("free_requested", "free_completed"):
                self._note(action, handle.address, handle.requested_size, handle.free_set.stream, frames)
        super().free(handle)

    def empty_cache(self) -> None:
        super().empty_cache()
        self._note_segments(0, [])

    def _allocated(self, block: Block | None, size: int, stream: int) -> Block | None:
        frames = self._frames(next(self._allocations))
        self._note_segments(stream, frames)
        if block is not None:
            self._note("alloc", block.address, size, stream, frames)
        return block

    def _note_segments(self, stream: int, frames: list[dict[str, object]]) -> None:
        if self.reserved_bytes == self._reserved:
            return
        views = self.segments()
        for expandable, (taken, given) in _SEGMENT_ACTIONS.items():
            held = self._ranges.get(expandable, [])
            ranges = [(v.address, v.address + v.total_size) for v in views if v.is_expandable == expandable]
            for action, changed in ((given, _without(held, ranges)), (taken, _without(ranges, held))):
                for begin, end in changed:
                    self._note(action, begin, end - begin, stream, frames)
            self._ranges[expandable] = ranges
        self._reserved = self.reserved_bytes

    def _note(self, action: str, address: int, size: int, stream: int, frames: list[dict[str, object]]) -> None:
        row = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": len(self.rows)}
        self.rows.append({**row, "frames": frames})

    def _operators(self, kind: EventKind) -> Iterator[int]:
        """The operators of the events of one kind that reach the allocator, in order."""
        trace = self._trace
        for event in (trace.kinds == kind).nonzero()[0].tolist():
            if trace.storages[int(trace.subjects[event])].place == Place.DEVICE:
                yield int(trace.event_operators[event])

    def _frames(self, index: int) -> list[dict[str, Any]]:
        if index not in self._frames_of:
            operator = self._trace.operators[index]
            self._frames_of[index] = _frames_of(operator, str(self._trace.phases[operator.phase]))
        return self._frames_of[index]


def _frames_of(operator: Operator, phase: str) -> list[dict[str, Any]]:
    """A stack, innermost first: the operator at its source line, the module it ran in, the phase."""
    filename, _, line = operator.source.rpartition(":")
    where = {"filename": filename, "line": int(line)} if line.isdigit() else {"filename": operator.source, "line": 0}
    stack = [{"name": operator.name, **where}]
    stack += [{"name": name, "filename": "", "line": 0} for name in (operator.module, phase) if name]
    return stack


def _without(ranges: list[Interval], others: list[Interval]) -> Iterator[Interval]:
    """The parts of ``ranges`` that ``others`` do not cover; each list is in order and does not overlap itself."""
    position = 0
    for begin, end in ranges:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        at = position
        while begin < end and at < len(others) and others[at][0] < end:
            if begin < others[at][0]:
                yield begin, others[at][0]
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            yield begin, end
