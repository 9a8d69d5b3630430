"""TensorFlow on one GPU: the limit of its allocator on a card, and what a trace does under it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphmem.devices import Device, as_cuda
from graphmem.diagnostics import Code, Diagnostic
from graphmem.replay import Replay
from graphmem.runtimes.bfc import bfc_runs, driver_pool_runs, free_bytes
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


# --- the card ---------------------------------------------------------------------------------------------------------


def limit_on(options: TensorFlowOptions, device: Device) -> int:
    """Bytes that TensorFlow's allocator may hold on a card of which others hold ``taken_bytes``."""
    return memory_limit_bytes(
        options,
        total_bytes=device.capacity_bytes,
        available_bytes=free_bytes(device),
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
    room = free_bytes(device)
    if options.per_device_memory_limit_mb:  # StreamExecutor refuses allocations beyond it
        room = min(room, options.per_device_memory_limit_mb * MIB)
    found = bfc_runs(trace, options.bfc(), limit, room)
    details = tuple(found.details(limit).items())
    if found.limited is not None:
        return CardRuns(found.main, found.limited, limit, (_failure_note(found.main, limit),), details)
    if found.enough_bytes is None:
        return CardRuns(found.main, None, limit, _regions_note(found.main), details)
    grown = found.grown
    note = (
        f"without memory growth TensorFlow takes its whole limit of {format_bytes(limit)} at once; this run works with "
        f"memory_limit={-(-found.enough_bytes // MIB)} (MiB), and with memory growth it holds "
        + (format_bytes(grown.peak_reserved_bytes) if grown and grown.out_of_memory is None else "more than there is")
    )
    return CardRuns(found.main, None, limit, (Diagnostic(Code.NOTE, note),), details)


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
    main, failed = driver_pool_runs(trace, held, free_bytes(device))
    uncounted = "rounding and fragmentation inside the driver's pool (cuda_malloc_async) count as 0"
    note = Diagnostic(Code.UNKNOWN, uncounted)
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
