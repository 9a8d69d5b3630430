"""Questions of a program about the card's memory: statistics, snapshots, free memory; and the limits that it sets.

Most of it is PyTorch's own Python over a few C functions. They ask the allocator that follows the capture
(:class:`~graphmem.capture.ports.DeviceMemory`); without one, the statistics are 0 and the card is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from graphmem.capture.device.pretend_device import CUDA_MODULES, ShownCard
from graphmem.capture.patches import Patches
from graphmem.capture.ports import DeviceMemory

if TYPE_CHECKING:
    from graphmem.capture.record.recorder import Recorder

#: Parts of ``torch._C._cuda_memoryStats``: kinds of memory with statistics by pool, statistics without pools, counters
#: (``THCPModule_memoryStats``, torch/csrc/cuda/Module.cpp, 2.13).
_BY_POOL = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_OVERSIZE = ("oversize_allocations", "oversize_segments")
_COUNTERS = (
    "num_alloc_retries", "num_ooms", "max_split_size", "num_sync_all_streams", "num_device_alloc", "num_device_free",
    "num_oom_rejections",
)  # fmt: skip
_T = TypeVar("_T")


class Answers:
    """The questions of one program, in the order of its events."""

    def __init__(self, shown_card: ShownCard, book: Recorder | None) -> None:
        self._shown_card = shown_card
        self._book = book
        self._keeps_history = False

    def _settled_memory(self) -> DeviceMemory | None:
        """Let the book settle the events up to now; its allocator, or None where none follows the capture."""
        if self._book is None:
            return None
        self._book.settle()
        return self._book.memory

    def _note_allocator(self) -> None:
        """The figures of an allocator depend on its options, and near its limit on the card."""
        self._shown_card.asked.add("allocator")

    def of(self, read: Callable[[DeviceMemory], _T], without: Callable[[], _T]) -> Callable[..., _T]:
        """A function that reads something of the allocator, or gives the value ``without`` one."""

        def answer(*_: object, **__: object) -> _T:
            memory = self._settled_memory()
            if memory is None:
                return without()
            self._note_allocator()
            return read(memory)

        return answer

    def record_history(self, enabled: object = None, *_: object, **__: object) -> None:
        """``torch.cuda.memory._record_memory_history``: snapshots have the events, here those before it, too."""
        self._keeps_history = enabled not in (None, False)

    def snapshot(self, memory: DeviceMemory) -> dict[str, Any]:
        """``torch._C._cuda_memorySnapshot``: the heap, and the events where these are recorded."""
        return memory.history() if self._keeps_history else _snapshot(memory.segments())

    def free_and_total(self, *_: object, **__: object) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``."""
        empty, total = self._shown_card.empty_bytes(), self._shown_card.total_bytes()
        memory = self._settled_memory()
        free = empty if memory is None else memory.free_bytes()
        if free != empty:
            self._note_allocator()
        return free, total

    def used(self, *_: object, **__: object) -> int:
        """``torch.cuda.device_memory_used``."""
        free, total = self.free_and_total()
        return total - free


def patch_memory(patches: Patches, shown_card: ShownCard, book: Recorder) -> None:
    """Let ``torch.cuda`` and ``torch.accelerator`` answer from the book's allocator."""
    answers = Answers(shown_card, book)
    reset_peaks = answers.of(lambda memory: memory.reset_peaks(), lambda: None)
    reset_accumulated = answers.of(lambda memory: memory.reset_accumulated(), lambda: None)

    def event(name: str) -> Callable[..., None]:
        return lambda *_, **__: book.allocator_event(name)

    def set_settings(text: object, *_: object) -> None:
        book.allocator_settings(str(text))

    c_functions: dict[str, Callable[..., object]] = {
        "_cuda_memoryStats": answers.of(lambda memory: memory.statistics(), _zeros),
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_memorySnapshot": answers.of(answers.snapshot, lambda: _snapshot([])),
        "_cuda_record_memory_history": answers.record_history,
        "_cuda_record_memory_history_legacy": answers.record_history,
        "_cuda_getMemoryFraction": answers.of(lambda memory: memory.fraction, lambda: 1.0),
        "_cuda_setMemoryFraction": lambda fraction, *_: book.memory_fraction(float(fraction)),
        "_cuda_synchronize": event("synchronize"),
        "_cuda_emptyCache": event("empty_cache"),
        "_accelerator_setAllocatorSettings": set_settings,
        "_cuda_cudaCachingAllocator_set_allocator_settings": set_settings,  # its name before 2.9
    }
    patches.table(torch._C, c_functions)
    patches.where_found(CUDA_MODULES, {"mem_get_info": answers.free_and_total, "device_memory_used": answers.used})
    of_cuda = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats")
    functions: dict[str, Callable[..., object]] = {
        **{name: partial(_of_own_card, name) for name in of_cuda},
        "reset_peak_memory_stats": reset_peaks,
        "reset_accumulated_memory_stats": reset_accumulated,
        "get_memory_info": answers.free_and_total,
        "synchronize": event("synchronize"),
        "empty_cache": event("empty_cache"),
    }
    patches.table(torch.accelerator, functions)


def _of_own_card(name: str, *_: object, **__: object) -> object:
    """The function of ``torch.cuda``, for the current device."""
    return getattr(torch.cuda, name)()


def _snapshot(segments: list[dict[str, object]]) -> dict[str, Any]:
    """The heap, without its history."""
    return {"segments": segments, "device_traces": [[]], "allocator_settings": {}}


def _zeros() -> dict[str, Any]:
    def statistic() -> dict[str, int]:
        return {"current": 0, "peak": 0, "allocated": 0, "freed": 0}

    stats: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
    stats.update((kind, {pool: statistic() for pool in ("all", "small_pool", "large_pool")}) for kind in _BY_POOL)
    stats.update((kind, statistic()) for kind in _OVERSIZE)
    return stats
