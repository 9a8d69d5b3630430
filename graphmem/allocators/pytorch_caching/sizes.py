"""The size rules of the caching allocator; all figures are bytes.

``round_size``, ``roundup_power2_next_division`` and ``get_allocation_size`` of ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphmem.allocators.alloc_conf import MIN_LARGE_ALLOC_BYTES, ROUNDUP_SLOTS
from graphmem.units import GIB, KIB, MIB

# c10/core/AllocatorConfig.h, torch 2.13 (the same since 1.13).
MIN_BLOCK_BYTES = 512  # kMinBlockSize: all sizes are rounded up to a multiple of it
SMALL_BYTES = 1 * MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: segments of the small pool
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: a segment for one large request is a multiple of it
# CUDACachingAllocator.cpp, one_exa_bytes: requests from this size on are refused outright.
ONE_EXBIBYTE = 1 << 60


def round_size(size: int, divisions_by_slot: Sequence[int]) -> int:
    """Bytes of the block that serves a request of ``size`` bytes."""
    if size < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    # Slot 0 holds sizes below 2 MiB, slot 1 those below 4 MiB, and so on (AllocatorConfig.cpp).
    slot = min(max(size.bit_length() - 21, 0), ROUNDUP_SLOTS - 1)
    divisions = divisions_by_slot[slot]
    if divisions > 1 and size > MIN_BLOCK_BYTES * divisions:
        return _next_division(size, divisions)
    return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def _next_division(size: int, divisions: int) -> int:
    """The next of the ``divisions`` equal steps between two powers of two."""
    if size & (size - 1) == 0:
        return size
    power = 1 << (size.bit_length() - 1)
    step = power >> (divisions.bit_length() - 1)
    return 2 * power if step == 0 else -(-size // step) * step


def get_allocation_size(rounded: int, large_segment_bytes: int) -> int:
    """Bytes of the segment made for a block of ``rounded`` bytes when no free block serves it."""
    if rounded <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < MIN_LARGE_ALLOC_BYTES:
        return large_segment_bytes
    return -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def format_size(size: int) -> str:
    """A size as PyTorch's error messages show it (``format_size``)."""
    if size <= KIB:
        return f"{size} bytes"
    if size <= MIB:
        return f"{size / KIB:.2f} KiB"
    if size <= GIB:
        return f"{size / MIB:.2f} MiB"
    return f"{size / GIB:.2f} GiB"
