"""TensorFlow on one GPU: the limit of its allocator on a card, and what a trace does under it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphmem.allocators.base import SegmentView
from graphmem.allocators.bfc import BumpDriver
from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.tensorflow_bfc import MAX_INTERNAL_FRAGMENTATION_BYTES, BFCOptions, TensorFlowBFC
from graphmem.devices import Device, as_cuda
from graphmem.diagnostics import Code, Diagnostic
from graphmem.replay import Replay, replay
from graphmem.runtimes.tensorflow.options import (
    DEFAULT_CUDNN_WORKSPACE_BYTES,
    TensorFlowOptions,
    memory_limit_bytes,
)
from graphmem.trace import Category, Operator, Storage, Trace
from graphmem.units import MIB, format_bytes

#: The release whose allocator was recorded and whose options are read.
VERSION = "2.21"
#: ``BaseGPUDevice::InitScratchBuffers`` (gpu_device.cc): Eigen::kGpuScratchSize and an unsigned int, taken with the
#: first kernel and kept.
EIGEN_SCRATCH_BYTES = 1024 + 4
#: Operators of PyTorch and ONNX that TensorFlow would run as convolutions of cuDNN.
_CONVOLUTION = re.compile(r"convolution|Conv(Transpose)?$")
#: More than any card has; the address space of a region as large as it needs to be.
_ENDLESS = 1 << 56


@dataclass(frozen=True)
class CardRuns:
    """A trace on a card: ``main`` gives the figures, ``limited`` is the run that failed, if one did.

    ``limit_bytes`` is the allocator's limit; ``notes`` and ``details`` are for the reader.
    """

    main: Replay
    limited: Replay | None
    limit_bytes: int
    notes: tuple[Diagnostic, ...]
    details: tuple[tuple[str, Any], ...]


class OneRegion:
    """TensorFlow's allocator without growth, over a region that is as large as this run needs it to be.

    ``reserved_bytes`` is the end of the highest chunk used so far. A limit of its peak plus ``most_waste`` gives the
    same chunks: the untouched rest of the region is then always large enough to be split.
    """

    name = "tensorflow-bfc, one region"

    def __init__(self, options: BFCOptions) -> None:
        self._inner = TensorFlowBFC(_ENDLESS, replace(options, allow_growth=False, fragmentation_fraction=0.0))
        self._base: int | None = None
        self.allocated_bytes = 0
        self.reserved_bytes = 0

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """A chunk; never fails."""
        address = self._inner.malloc(size, stream)
        if address is not None:
            self._base = address if self._base is None else self._base
            end = address - self._base + self._inner.allocated_bytes - self.allocated_bytes
            self.allocated_bytes = self._inner.allocated_bytes
            self.reserved_bytes = max(self.reserved_bytes, end)
        return address

    def free(self, handle: int | None) -> None:
        """Free a chunk."""
        self._inner.free(handle)
        self.allocated_bytes = self._inner.allocated_bytes

    def record_stream(self, handle: int | None, stream: int) -> None:
        """Nothing, as in TensorFlow's allocator."""

    def synchronize(self) -> None:
        """Nothing, as in TensorFlow's allocator."""

    def empty_cache(self) -> None:
        """Nothing, as in TensorFlow's allocator."""

    def segments(self) -> tuple[SegmentView, ...]:
        """The region, up to its highest chunk."""
        whole = self._inner.segments()
        if not whole:
            return ()
        blocks = [block for block in whole[0].blocks if block.address < whole[0].address + self.reserved_bytes]
        last = blocks[-1]
        blocks[-1] = replace(last, size=whole[0].address + self.reserved_bytes - last.address)
        return (replace(whole[0], total_size=self.reserved_bytes, blocks=tuple(blocks)),)


# --- the card ---------------------------------------------------------------------------------------------------------


def bare_context_bytes(device: Device) -> int:
    """The memory held when TensorFlow asks how much is free: a CUDA context without kernels and libraries.

    With it the limits that TensorFlow logs on A100, H100, T4 and RTX 3090 come out within 1 % (reports/tensorflow.md).
    """
    if not device.sm_count:
        return device.context_bytes
    return min(device.context_bytes, device.empty_context().bytes)


def limit_on(options: TensorFlowOptions, device: Device) -> int:
    """Bytes that TensorFlow's allocator may hold on a card of which others hold ``taken_bytes``."""
    available = max(0, device.capacity_bytes - device.others_bytes - bare_context_bytes(device))
    return memory_limit_bytes(
        options,
        total_bytes=device.capacity_bytes,
        available_bytes=available,
        system_bytes=as_cuda(device).limits.tensorflow_system_bytes,
    )


def describe(options: TensorFlowOptions, device: Device) -> str:
    """The allocator in words, with its limit."""
    limit = format_bytes(limit_on(options, device))
    if options.use_cuda_malloc_async:
        return f"TensorFlow {VERSION} cuda_malloc_async (release threshold {limit})"
    growth = "with" if options.allow_growth else "without"
    return f"TensorFlow {VERSION} BFC {growth} memory growth, limit {limit}"


# --- the run ----------------------------------------------------------------------------------------------------------


def with_eigen_scratch(trace: Trace) -> Trace:
    """The trace with the scratch buffer that TensorFlow's device takes before anything else and never gives back."""
    scratch = Storage(EIGEN_SCRATCH_BYTES, Category.WORKSPACE, label="Eigen scratch of the device")
    first = int(trace.event_operators[0]) if len(trace) else 0
    phase = trace.operators[first].phase if trace.operators else 0
    operator = Operator("ScratchBuffer", phase=phase)

    def led_by(value: int, column: object) -> Any:
        return np.concatenate([np.array([value], dtype=np.int64), column])

    return replace(
        trace,
        operators=(*trace.operators, operator),
        storages=(*trace.storages, scratch),
        kinds=led_by(0, trace.kinds),
        subjects=led_by(len(trace.storages), trace.subjects),
        event_operators=led_by(len(trace.operators), trace.event_operators),
        event_streams=led_by(0, trace.event_streams),
    )


def run_on_card(trace: Trace, options: TensorFlowOptions, device: Device) -> CardRuns:
    """Replay ``trace`` (see :func:`with_eigen_scratch`) under the limit of the card.

    Where that fails, the figures are those of one region as large as the run needs.
    """
    limit = limit_on(options, device)
    runs = _async_runs if options.use_cuda_malloc_async else _bfc_runs
    found = runs(trace, options, device, limit)
    notes = [Diagnostic(Code.WARNING, text) for text in options.warnings]
    notes += _autotuning(trace, options)
    return replace(found, notes=(*notes, *found.notes))


def _bfc_runs(trace: Trace, options: TensorFlowOptions, device: Device, limit: int) -> CardRuns:
    room = max(0, device.capacity_bytes - device.others_bytes - bare_context_bytes(device))
    if options.per_device_memory_limit_mb:  # StreamExecutor refuses allocations beyond it
        room = min(room, options.per_device_memory_limit_mb * MIB)

    def under(bfc: BFCOptions, limit_bytes: int = limit) -> Replay:
        driver = BumpDriver(room)
        return replay(trace, TensorFlowBFC(limit_bytes, bfc, driver_alloc=driver.alloc, driver_free=driver.free))

    bfc = options.bfc()
    as_set = under(bfc)
    if as_set.out_of_memory is None and bfc.allow_growth:
        return CardRuns(as_set, None, limit, _regions_note(as_set), _details(limit, as_set, None, as_set))
    whole = replay(trace, OneRegion(bfc))
    if as_set.out_of_memory is not None:
        return CardRuns(whole, as_set, limit, (_failure_note(whole, limit),), _details(limit, as_set, whole, None))
    enough = _enough(whole, bfc, lambda size: under(replace(bfc, allow_growth=False), size))
    grown = under(replace(bfc, allow_growth=True))
    note = (
        f"without memory growth TensorFlow takes its whole limit of {format_bytes(limit)} at once; this run works with "
        f"memory_limit={-(-enough // MIB)} (MiB), and with memory growth it holds "
        + (format_bytes(grown.peak_reserved_bytes) if grown.out_of_memory is None else "more than there is")
    )
    return CardRuns(as_set, None, limit, (Diagnostic(Code.NOTE, note),), _details(limit, as_set, whole, grown, enough))


def _enough(whole: Replay, bfc: BFCOptions, under: Callable[[int], Replay]) -> int:
    """A limit that this run works with: the end of the highest chunk, or a little more.

    A rest of the region that is too small to be split goes to one chunk whole, and may then be missing. With room for a
    split above everything that cannot happen.
    """
    size = whole.peak_reserved_bytes
    for spare in (0, 16 * MIB, 64 * MIB):
        if bfc.fragmentation_fraction == 0 and under(-(-(size + spare) // MIB) * MIB).out_of_memory is None:
            return size + spare
    return size + MAX_INTERNAL_FRAGMENTATION_BYTES


def _details(
    limit: int, as_set: Replay, whole: Replay | None, grown: Replay | None, enough: int | None = None
) -> tuple[tuple[str, Any], ...]:
    found: list[tuple[str, Any]] = [("memory_limit_bytes", limit), ("garbage_collections", as_set.retries)]
    if whole is not None:
        found.append(("one_region_bytes", whole.peak_reserved_bytes))
    if enough is not None:
        found.append(("sufficient_memory_limit_bytes", enough))
    if grown is not None and grown.out_of_memory is None:
        found.append(("reserved_with_memory_growth_bytes", grown.peak_reserved_bytes))
        found.append(("regions_with_memory_growth", [format_bytes(s.total_size) for s in grown.segments]))
    return tuple(found)


def _regions_note(grown: Replay) -> tuple[Diagnostic, ...]:
    sizes = ", ".join(format_bytes(segment.total_size) for segment in grown.segments)
    text = f"with memory growth, regions are held until the process ends: {sizes or 'none'}"
    if grown.retries:
        text += f"; free regions were given back {grown.retries} times to make room"
    return (Diagnostic(Code.NOTE, text),)


def _failure_note(whole: Replay, limit: int) -> Diagnostic:
    return Diagnostic(
        Code.NOTE,
        f"TensorFlow's limit on this card is {format_bytes(limit)}; the figures are those of one region as large as "
        f"the run needs, {format_bytes(whole.peak_reserved_bytes)}",
    )


def _async_runs(trace: Trace, options: TensorFlowOptions, device: Device, limit: int) -> CardRuns:
    """The driver's own pool: its rounding and caching are not public, so live bytes are the bound that is known.

    TensorFlow sets the pool's release threshold to the limit (memory is kept up to it) and no maximum.
    """
    held = limit if options.async_preallocation_bytes == -1 else max(0, options.async_preallocation_bytes)
    room = max(0, device.capacity_bytes - device.others_bytes - bare_context_bytes(device))
    main = replay(trace, IdealAllocator())
    limited = replay(trace, IdealAllocator(room))
    reserved = np.maximum(np.maximum.accumulate(main.reserved_bytes), held) if len(main) else main.reserved_bytes
    main = replace(main, reserved_bytes=reserved, peak_reserved_bytes=max(main.peak_reserved_bytes, held))
    uncounted = "rounding and fragmentation inside the driver's pool (cuda_malloc_async) count as 0"
    note = Diagnostic(Code.UNKNOWN, uncounted)
    failed = limited if limited.out_of_memory is not None else None
    return CardRuns(main, failed, limit, (note,), (("release_threshold_bytes", limit),))


def _autotuning(trace: Trace, options: TensorFlowOptions) -> list[Diagnostic]:
    """Convolutions whose algorithms TensorFlow would try out, each with scratch of its own."""
    count = sum(bool(_CONVOLUTION.search(operator.name)) for operator in trace.operators)
    if not count:
        return []
    limit = options.cudnn_workspace_limit_bytes
    default = " by default" if limit == DEFAULT_CUDNN_WORKSPACE_BYTES else ""
    text = (
        f"scratch while TensorFlow tries out convolution algorithms: up to {format_bytes(limit)} each{default} "
        "(TF_CUDNN_WORKSPACE_LIMIT_IN_MB), given back at once; regions grown for it stay"
    )
    return [Diagnostic(Code.UNKNOWN, text, count)]
