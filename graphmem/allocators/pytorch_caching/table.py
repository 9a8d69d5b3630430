"""The table of blocks that :mod:`.plain_path` fills: a row a block, of whole numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Columns. ``SERIAL`` and ``ADDRESS`` make a block's order; ``PREV`` and ``NEXT`` are rows, or -1; ``SET`` is twice the
#: stream, and one more in the large pool. ``REQUESTED`` of address space that is not mapped: how often memory was
#: mapped before it.
SIZE, SERIAL, ADDRESS, PREV, NEXT, STATE, SET, REQUESTED = range(8)
#: What is counted: bytes reserved, bytes of whole pages for them and the most of these, free ranges of addresses;
#: segments taken and given back, how often all that could be were, and the last serial number.
RESERVED, MAPPED, MOST_MAPPED, HOLES, TAKEN, GIVEN, RETRIES, LAST_SERIAL = range(8)


class Table(NamedTuple):
    """The blocks; the first ``counts`` of each row of ``free``, a set, and their sizes; of each set the row of
    ``tails`` that is the unmapped end of its expandable segment, -1 for none; the free ranges of addresses, each with
    its bytes; and what is ``counted``."""

    blocks: npt.NDArray[np.int64]
    free: npt.NDArray[np.int64]
    free_sizes: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    tails: npt.NDArray[np.int64]
    holes: npt.NDArray[np.int64]
    counted: npt.NDArray[np.int64]

    @staticmethod
    def empty(storages: int, sets: int) -> Table:
        """Room for so many storages: a request makes two blocks at most, and each set may have a segment."""
        rows = 2 * storages + sets
        free, free_sizes = np.zeros((2, sets, rows), dtype=np.int64)
        counts, tails = np.zeros(sets, dtype=np.int64), np.full(sets, -1, dtype=np.int64)
        holes, counted = np.zeros((storages + 1, 2), dtype=np.int64), np.zeros(8, dtype=np.int64)
        return Table(np.zeros((rows, 8), dtype=np.int64), free, free_sizes, counts, tails, holes, counted)


class Rules(NamedTuple):
    """The allocator's settings in bytes; ``room``: what the card has, -1 for no limit; ``small_range`` and
    ``large_range``: addresses of an expandable segment; ``numbers_segments``: 1 where they have serial numbers."""

    large_segment: int
    max_split: int
    most_rounding: int
    is_expandable: int
    small_range: int
    large_range: int
    numbers_segments: int
    room: int
