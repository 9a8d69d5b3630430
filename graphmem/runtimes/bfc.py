"""A trace in the allocator that TensorFlow and JAX share, on one card: the replays that their reports speak of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphmem.allocators.bfc import BumpDriver
from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.tensorflow_bfc import MAX_INTERNAL_FRAGMENTATION_BYTES, BFCOptions, OneRegion, TensorFlowBFC
from graphmem.devices import Device
from graphmem.replay import Replay, replay
from graphmem.trace import Trace
from graphmem.units import MIB, format_bytes


@dataclass(frozen=True)
class BFCRuns:
    """``as_set``: under the limit, as the options say. ``whole``: in one region as large as the run needs; None where
    regions grow and the limit is enough. ``grown``: in regions that grow. ``enough_bytes``: a limit that is enough for
    one region, None where the run does not fit."""

    as_set: Replay
    whole: Replay | None
    grown: Replay | None
    enough_bytes: int | None = None

    @property
    def main(self) -> Replay:
        """The run that gives the figures."""
        return self.whole if self.whole is not None and self.as_set.out_of_memory is not None else self.as_set

    @property
    def limited(self) -> Replay | None:
        """The run that failed, if it did."""
        return self.as_set if self.as_set.out_of_memory is not None else None

    def details(self, limit: int) -> dict[str, Any]:
        """Figures for the reader, in bytes."""
        found: dict[str, Any] = {"memory_limit_bytes": limit, "garbage_collections": self.as_set.retries}
        if self.whole is not None:
            found["one_region_bytes"] = self.whole.peak_reserved_bytes
        if self.enough_bytes is not None:
            found["sufficient_memory_limit_bytes"] = self.enough_bytes
        if self.grown is not None and self.grown.out_of_memory is None:
            found["reserved_with_memory_growth_bytes"] = self.grown.peak_reserved_bytes
            found["regions_with_memory_growth"] = [format_bytes(s.total_size) for s in self.grown.segments]
        return found


def bare_context_bytes(device: Device) -> int:
    """The memory held when a program asks how much is free: a CUDA context without kernels and libraries.

    With it the limits that TensorFlow logs on A100, H100, T4 and RTX 3090 come out within 1 % (reports/tensorflow.md).
    """
    if not device.sm_count:
        return device.context_bytes
    return min(device.context_bytes, device.empty_context().bytes)


def free_bytes(device: Device) -> int:
    """The memory that the driver says is free when the allocator is made."""
    return max(0, device.capacity_bytes - device.others_bytes - bare_context_bytes(device))


def bfc_runs(trace: Trace, bfc: BFCOptions, limit: int, room: int) -> BFCRuns:
    """The replays of ``trace`` under a limit in bytes, on a card that has ``room`` bytes for the allocator."""

    def under(options: BFCOptions, limit_bytes: int = limit) -> Replay:
        driver = BumpDriver(room)
        return replay(trace, TensorFlowBFC(limit_bytes, options, driver_alloc=driver.alloc, driver_free=driver.free))

    as_set = under(bfc)
    if as_set.out_of_memory is None and bfc.allow_growth:
        return BFCRuns(as_set, None, as_set)
    whole = replay(trace, OneRegion(bfc))
    if as_set.out_of_memory is not None:
        return BFCRuns(as_set, whole, None)
    enough = _enough(whole, bfc, lambda size: under(replace(bfc, allow_growth=False), size))
    return BFCRuns(as_set, whole, under(replace(bfc, allow_growth=True)), enough)


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


def driver_pool_runs(trace: Trace, held: int, room: int) -> tuple[Replay, Replay | None]:
    """The replays of a trace whose memory the driver's own pool hands out, of which ``held`` bytes are taken ahead, and
    on a card that has ``room`` bytes for it, where that is not enough. The pool's rounding and caching are not public:
    live bytes are the bound that is known."""
    main, limited = replay(trace, IdealAllocator()), replay(trace, IdealAllocator(room))
    reserved = np.maximum(np.maximum.accumulate(main.reserved_bytes), held) if len(main) else main.reserved_bytes
    main = replace(main, reserved_bytes=reserved, peak_reserved_bytes=max(main.peak_reserved_bytes, held))
    return main, limited if limited.out_of_memory is not None else None
