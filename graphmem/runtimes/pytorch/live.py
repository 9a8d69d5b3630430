"""The caching allocator while a program is captured: its answers to the program's questions, and its out-of-memory
errors.

It plays the very events that the trace gets, with the code that replays a trace, and so ends where the replay ends. It
plays them late: when the program asks, and when the requests since it played last could have reached the limit. Its
answers are those of that moment all the same, as events are played in their order.

What is recorded after the moment it happens at (a storage is seen to die when Python's last reference goes) is late for
both alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import format_size
from graphmem.allocators.pytorch_caching.views import as_snapshot
from graphmem.devices import Device
from graphmem.replay import Player, events_on_device
from graphmem.trace import Trace, TraceBuilder
from graphmem.units import MIB

#: Ends PyTorch's message (``CUDACachingAllocator.cpp``, recorded with 2.13, double spaces and all).
_ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
_NO_COLUMN: deque[int] = deque(maxlen=0)

#: An allocator for the card; whether with its limit, and whether with all statistics.
Make = Callable[[bool, bool], PyTorchCachingAllocator]
#: The snapshot of a trace; whether with the card's limit.
Record = Callable[[Trace, bool], dict[str, Any]]


class LiveMemory:
    """The memory of ``card`` as a program finds it (``graphmem.capture.ports.DeviceMemory``). Only with ``limited``
    does it ever run out. All figures are bytes."""

    def __init__(self, make: Make, record: Record, card: Device, *, limited: bool) -> None:
        self._make, self._record, self._card, self._limited = make, record, card, limited
        self._builder = TraceBuilder("nothing")
        self._tracks = False
        self._fraction = 1.0
        self._room = 0  # bytes that may be asked for until it must play to know
        self._begin()

    def follow(self, builder: TraceBuilder) -> None:
        """Answer for the events of ``builder`` from now on."""
        self._builder = builder
        self._begin()

    def lift_limit(self) -> None:
        """From now on no request is refused."""
        if self._limited:
            self._limited = False
            self._begin()

    def refusal(self, index: int) -> str | None:
        """PyTorch's message where the request for storage ``index``, recorded just now, is out of memory."""
        if not self._limited:
            return None
        self._room -= self._most_reserved_for(self._builder.storage_bytes[index])
        if self._room >= 0:
            return None
        refused = self._catch_up()
        self._room = self._allocator.room_bytes()
        return None if refused is None else self._words(refused)

    # --- what the program asks ----------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """``torch._C._cuda_memoryStats``: nested dictionaries of whole numbers."""
        nested: dict[str, Any] = {}
        for name, value in self._tracking().memory_stats().items():
            *path, last = name.split(".")
            place = nested
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        return nested

    def reset_peaks(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self._tracking().reset_peak_stats()

    def reset_accumulated(self) -> None:
        """``torch.cuda.reset_accumulated_memory_stats``."""
        self._tracking().reset_accumulated_stats()

    def free_bytes(self) -> int:
        """The free bytes of ``cudaMemGetInfo``: those of neither the allocator's segments, the context, nor others."""
        self._catch_up()
        taken = self._allocator.driver.used_bytes + self._card.taken_bytes
        return max(0, self._card.capacity_bytes - taken)

    def segments(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot``, without the stacks."""
        self._catch_up()
        return [as_snapshot(view) for view in self._allocator.segments()]

    def history(self) -> dict[str, Any]:
        """``torch.cuda.memory._snapshot`` with all that was recorded so far, and the stacks that are known of it."""
        found = self._record(self._builder.build(), self._limited)
        self._begin()  # what calls got on this card is forgotten in a trace
        return found

    @property
    def fraction(self) -> float:
        """The part of the card's memory that may be reserved."""
        return self._fraction

    def fraction_set(self, fraction: float) -> None:
        """``torch.cuda.set_per_process_memory_fraction``, whose event has been recorded."""
        self._fraction = fraction
        self._room = 0

    # --- playing ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A fresh allocator, which has played nothing."""
        builder = self._builder
        for calls in builder.calls.values():
            calls.settle(0, 0, builder.storage_bytes)
        self._allocator = self._make(self._limited, self._tracks)
        self._player = Player(
            self._allocator, builder.storage_bytes, builder.streams, builder.storage_pools, builder.calls
        )
        self._played = self._pools = 0
        self._room = 0
        self._most_rounding = max(self._allocator.conf.large_segment_size_bytes, 20 * MIB) + 2 * MIB

    def _most_reserved_for(self, size: int) -> int:
        """More than what one request can make the allocator reserve, whatever its options round to."""
        return 2 * MIB if size <= MIB // 2 else 2 * size + self._most_rounding

    def _catch_up(self) -> Exception | None:
        """Play what was recorded since; the error of the request that was refused now, which can only be the last."""
        builder = self._builder
        rows = builder.rows[self._played :]
        self._played += len(rows)
        for number, pool in enumerate(builder.pools[self._pools :], self._pools + 1):
            self._allocator.declare_pool(number, use_on_oom=pool.use_on_oom, no_split=pool.no_split)
        self._pools = len(builder.pools)
        events = events_on_device(rows, builder.places, builder.storage_pools)
        note, refused = _NO_COLUMN.append, None
        while self._player.play(events, note, note, builder.fractions, builder.settings) >= 0:
            refused = self._player.error
        return refused

    def _tracking(self) -> PyTorchCachingAllocator:
        """The allocator with all its statistics, kept from the first question on: it plays everything anew."""
        if not self._tracks:
            self._tracks = True
            self._begin()
        self._catch_up()
        return self._allocator

    def _words(self, error: Exception) -> str:
        """The message with what NVML adds to it (``reportProcessMemoryInfo``), and PyTorch's advice."""
        driver = self._allocator.driver
        in_use = format_size(driver.used_bytes + driver.other_bytes)
        process = f" is free. Including non-PyTorch memory, this process has {in_use} memory in use. "
        text = str(error)
        return text if " is free. " not in text else text.replace(" is free. ", process, 1) + _ADVICE
