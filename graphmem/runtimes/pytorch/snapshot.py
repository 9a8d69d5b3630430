"""A trace, replayed by the simulated PyTorch allocator, as the pickle that ``torch.cuda.memory._dump_snapshot`` writes.

https://pytorch.org/memory_viz shows it, and ``graphmem replay`` reads it. The format is that of
``torch/csrc/cuda/Module.cpp`` (2.13): ``segments`` is the heap at the end, ``device_traces`` every event from the first
on. Times are the numbers of the events: an estimate has no clock. A block's ``frames`` name the operator that asked for
it, what it is for, its module and the phase, each with the source line that is known of it; of the memory of a backward
pass that line is in the forward pass, and stands in ``forward_frames`` too, as of anomaly mode. Phases are
``external_annotations``, as ranges of ``record_function`` are.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import Block, round_size
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
    return recorded(trace, runtime.configuration_text(alloc_conf, version), version)


def recorded(trace: Trace, text: str, version: tuple[int, int], driver: CudaDriver | None = None) -> dict[str, Any]:
    """The same on a card of which ``driver`` knows the limit: requests that it refuses are in it, too."""
    allocator = _Recording(trace, text, version, driver)
    replay(trace, allocator)
    return {
        "segments": [allocator.with_frames(as_snapshot(view)) for view in allocator.segments()],
        "device_traces": [allocator.rows],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": text},
        "external_annotations": allocator.annotations(),
    }


#: Keys of a row about who asked for the memory.
Why = dict[str, Any]

#: Of segments, which serve anybody. The viewer colours by category only where one is of this name.
_NOBODY: Why = {"category": "unknown", "user_metadata": "", "pool_id": (0, 0), "frames": []}


class _Recording(PyTorchCachingAllocator):
    """The caching allocator, noting every block and segment that it hands out or takes back."""

    def __init__(self, trace: Trace, text: str, version: tuple[int, int], driver: CudaDriver | None) -> None:
        super().__init__(None, parse_alloc_conf(text, version), version, driver=driver)
        self.rows: list[dict[str, Any]] = []
        self._trace = trace
        self._allocations = self._events_of(EventKind.ALLOC)
        self._frees = self._events_of(EventKind.FREE)
        self._refusals = self._events_of(EventKind.REFUSED)
        self._ranges: dict[bool, list[Interval]] = {}
        self._reserved = 0
        self._frames_of: dict[tuple[int, str], list[dict[str, Any]]] = {}
        self._why: dict[int, Why] = {}  # of the blocks that are allocated, by their addresses
        self._segment_frames: dict[int, list[dict[str, Any]]] = {}
        self._phases: list[tuple[int, int]] = []  # the phase that begins at a row

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        return self._allocated(super().malloc(size, stream), size, stream)

    def malloc_in_pool(self, size: int, stream: int, pool: int) -> Block | None:
        return self._allocated(super().malloc_in_pool(size, stream, pool), size, stream)

    def free(self, handle: Block | None) -> None:
        why = self._reason(*next(self._frees))
        if handle is not None:
            self._note_block("free_requested", handle, why)
        super().free(handle)

    def free_block(self, block: Block) -> None:
        self._note_block("free_completed", block, self._why[block.address])
        super().free_block(block)

    def empty_cache(self) -> None:
        super().empty_cache()
        self._note_segments(0, _NOBODY)

    def refuse(self, size: int, stream: int = 0, pool: int = 0) -> None:
        """What ``Module.cpp`` writes of a request that is out of memory: in place of an address what the driver has."""
        why, before = self._reason(*next(self._refusals)), self.num_ooms
        super().refuse(size, stream, pool)
        self._note_segments(stream, _NOBODY)
        if self.num_ooms > before:
            rounded = round_size(size, self.conf.roundup_power2_divisions)
            self._note("oom", self.driver.free_bytes(), rounded, stream, why)
            self.rows[-1]["device_free"] = self.rows[-1].pop("addr")

    def with_frames(self, segment: dict[str, Any]) -> dict[str, Any]:
        """A segment, itself and its blocks with the stacks of those who asked for them."""
        segment["frames"] = self._segment_frames.get(segment["address"], [])
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                block["frames"] = self._why[block["address"]]["frames"]
        return segment

    def annotations(self) -> list[dict[str, Any]]:
        """The phases, from where each begins to where the next one does."""
        ends = [row for row, _ in self._phases[1:]] + [len(self.rows)]
        return [
            {"stage": stage, "name": str(self._trace.phases[phase]), "device": 0, "time_us": row}
            for (begin, phase), end in zip(self._phases, ends, strict=True)
            for stage, row in (("START", begin), ("END", end))
        ]

    def _allocated(self, block: Block | None, size: int, stream: int) -> Block | None:
        why = self._reason(*next(self._allocations))
        self._note_segments(stream, {**_NOBODY, "frames": why["frames"]})
        if block is not None:
            self._why[block.address] = why
            self._note("alloc", block.address, size, stream, why)
        return block

    def _note_block(self, action: str, block: Block, why: Why) -> None:
        self._note(action, block.address, block.requested_size, block.free_set.stream, why)

    def _note_segments(self, stream: int, why: Why) -> None:
        if self.reserved_bytes == self._reserved:
            return
        views = self.segments()
        for expandable, (taken, given) in _SEGMENT_ACTIONS.items():
            held = self._ranges.get(expandable, [])
            ranges = [(v.address, v.address + v.total_size) for v in views if v.is_expandable == expandable]
            for action, changed in ((given, _without(held, ranges)), (taken, _without(ranges, held))):
                for begin, end in changed:
                    self._segment_frames[begin] = why["frames"]
                    self._note(action, begin, end - begin, stream, why)
            self._ranges[expandable] = ranges
        self._reserved = self.reserved_bytes

    def _note(self, action: str, address: int, size: int, stream: int, why: Why) -> None:
        row = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": len(self.rows)}
        self.rows.append({**row, "compile_context": "N/A", **why})

    def _events_of(self, kind: EventKind) -> Iterator[tuple[int, int]]:
        """Storage and operator of the events of one kind that reach the allocator, in order."""
        trace = self._trace
        for event in (trace.kinds == kind).nonzero()[0].tolist():
            storage = int(trace.subjects[event])
            if trace.storages[storage].place == Place.DEVICE:
                yield storage, int(trace.event_operators[event])

    def _reason(self, index: int, operator: int) -> Why:
        storage, made = self._trace.storages[index], self._trace.operators[operator]
        if not self._phases or self._phases[-1][1] != made.phase:
            self._phases.append((len(self.rows), made.phase))
        category = storage.category.name.lower()
        purpose = f"{category} {storage.label}".rstrip()
        if (operator, purpose) not in self._frames_of:
            self._frames_of[operator, purpose] = _frames_of(made, purpose, str(self._trace.phases[made.phase]))
        frames = self._frames_of[operator, purpose]
        why = {"category": category, "user_metadata": purpose, "pool_id": (0, storage.pool), "frames": frames}
        if self._trace.phases[made.phase].name == "backward" and made.source:
            where, module = frames[0], made.module or "forward"
            why["forward_frames"] = [f'  File "{where["filename"]}", line {where["line"]}, in {module}\n']
        return why


def _frames_of(operator: Operator, purpose: str, phase: str) -> list[dict[str, Any]]:
    """A stack, innermost first: the operator at its source line, what its memory is for, the module, the phase."""
    filename, _, line = operator.source.rpartition(":")
    unknown = {"filename": operator.source or "??", "line": 0}  # as PyTorch writes it
    where = {"filename": filename, "line": int(line)} if line.isdigit() else unknown
    names = (operator.name, purpose, operator.module, phase)
    return [{"name": name, **where} for name in names if name]


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
