"""``torch.cuda.memory_stats``: every counter of the allocator, kept only when asked for.

The replay needs allocated and reserved bytes, which the allocator counts itself; keeping all of these costs about as
much time as allocating. Names and meaning: ``c10/core/CachingDeviceAllocator.h``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphmem.allocators.pytorch_caching.blocks import FREE, Block, Pool

#: Counters kept three times: over both pools, over the small one, over the large one.
POOLED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
#: Counters that the allocator keeps itself, in attributes of these names.
COUNTERS = (
    "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_sync_all_streams", "num_device_alloc",
    "num_device_free",
)  # fmt: skip
OVERSIZE = ("oversize_allocations", "oversize_segments")


class Stat:
    """One counter: its value, its maximum, and the sums of everything added and taken away."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """``Stat::increase`` for a positive amount, ``Stat::decrease`` for a negative one."""
        self.current += amount
        if amount >= 0:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount


class DeviceStats:
    """The statistics of one device. Bytes and counts, as PyTorch names them.

    ``max_split_bytes`` is the size from which a block is oversize. Blocks of expandable segments are left out of the
    counters of inactive splits (``free_block``).
    """

    def __init__(self, max_split_bytes: int) -> None:
        self._max_split = max_split_bytes
        self._pooled = {name: (Stat(), Stat(), Stat()) for name in POOLED}
        self._oversize = {name: Stat() for name in OVERSIZE}
        #: Private pools that ever held memory; they stay when the pool is gone.
        self._reserved_by_private_pools: dict[int, tuple[Stat, Stat, Stat]] = {}

    def follow(self, max_split_bytes: int) -> None:
        """From now on blocks are oversize from this size on; those counted stay counted, as upstream."""
        self._max_split = max_split_bytes

    def change(self, name: str, is_small: bool, amount: int) -> None:
        """Change a counter of one pool, and of both together."""
        total, small, large = self._pooled[name]
        total.change(amount)
        (small if is_small else large).change(amount)

    def change_reserved(self, pool: Pool, amount: int) -> None:
        """Memory was obtained from the driver for a pool, or given back."""
        self.change("reserved_bytes", pool.is_small, amount)
        if pool.private_pool:
            stats = self._reserved_by_private_pools.setdefault(pool.private_pool, (Stat(), Stat(), Stat()))
            stats[0].change(amount)
            stats[1 if pool.is_small else 2].change(amount)

    def count_segment(self, block: Block, amount: int) -> None:
        """A segment, still or again one block, was obtained (1) or given back (-1)."""
        self.change("segment", block.free_set.is_small, amount)
        if block.size >= self._max_split:
            self._oversize["oversize_segments"].change(amount)

    def count_alloc(self, block: Block, was_split: bool, splits: bool) -> None:
        """A block was handed out; its segment was split before, or a remainder was split off now."""
        small = block.free_set.is_small
        if block.segment is None:
            if splits and not was_split:
                assert block.next is not None
                self.change("inactive_split_bytes", small, block.next.size)
                self.change("inactive_split", small, 1)
            elif was_split:
                self.change("inactive_split_bytes", small, -block.size)
                if not splits:
                    self.change("inactive_split", small, -1)
        self.change("allocation", small, 1)
        self.change("allocated_bytes", small, block.size)
        self.change("active", small, 1)
        self.change("active_bytes", small, block.size)
        self.change("requested_bytes", small, block.requested_size)
        if block.size >= self._max_split:
            self._oversize["oversize_allocations"].change(1)

    def count_free(self, block: Block) -> None:
        """The program gave a block back."""
        small = block.free_set.is_small
        self.change("allocation", small, -1)
        self.change("allocated_bytes", small, -block.size)
        if block.size >= self._max_split:
            self._oversize["oversize_allocations"].change(-1)

    def count_free_completed(self, block: Block) -> None:
        """A block is about to be merged with its free neighbours and put among the free ones."""
        small = block.free_set.is_small
        if block.segment is None:
            self._count_inactive_split(block, small)
        self.change("active", small, -1)
        self.change("active_bytes", small, -block.size)
        self.change("requested_bytes", small, -block.requested_size)

    def _count_inactive_split(self, block: Block, small: bool) -> None:
        before, after = block.prev, block.next
        merged = [neighbour for neighbour in (before, after) if neighbour is not None and neighbour.state == FREE]
        merged_bytes = sum(neighbour.size for neighbour in merged)
        # Alone in the segment after merging: nothing to the left and nothing to the right of what is merged.
        first = before is None or (before.state == FREE and before.prev is None)
        last = after is None or (after.state == FREE and after.next is None)
        alone = first and last
        change = (0 if alone else 1) - len(merged)
        change_bytes = (0 if alone else block.size + merged_bytes) - merged_bytes
        if change:
            self.change("inactive_split", small, change)
        if change_bytes:
            self.change("inactive_split_bytes", small, change_bytes)

    def reset_peaks(self) -> None:
        """``resetPeakStats``: the maxima begin anew at the present values."""
        for stat in self._all():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """``resetAccumulatedStats``: the sums begin anew at 0."""
        for stat in self._all():
            stat.allocated = stat.freed = 0

    def _all(self) -> Iterator[Stat]:
        for stats in self._pooled.values():
            yield from stats
        yield from self._oversize.values()

    def current(self, name: str) -> int:
        """The present value over both pools."""
        return self._pooled[name][0].current

    def as_dict(self) -> dict[str, int]:
        """All of them under the keys of ``torch.cuda.memory_stats()``, such as ``reserved_bytes.all.peak``.

        Where PyTorch writes the identity of a private pool (``0_1``), its number stands here.
        """
        private = {f"reserved_bytes_by_private_pools.{n}": s for n, s in self._reserved_by_private_pools.items()}
        named = {
            f"{name}.{pool}": stat
            for name, stats in (self._pooled | private).items()
            for pool, stat in zip(("all", "small_pool", "large_pool"), stats, strict=True)
        }
        return {
            f"{name}.{field}": getattr(stat, field)
            for name, stat in (named | self._oversize).items()
            for field in ("current", "peak", "allocated", "freed")
        }
