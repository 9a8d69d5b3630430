"""The recorded allocations of a TensorFlow process, given to graphmem's allocator."""

from __future__ import annotations

from pathlib import Path

from graphmem.allocators.tensorflow_bfc import BFCOptions, TensorFlowBFC
from graphmem.base.documents import fits, read_gzipped_json
from graphmem.errors import TraceError

#: Limit on the pool of the recorded process, in bytes: ``TF_CPU_BFC_MEM_LIMIT_IN_MB=65536``.
_LIMIT_BYTES = 64 << 30


def replayed_peaks(path: Path) -> tuple[int, int]:
    """Peak bytes in use and peak bytes of the pool, of a recording beside TensorFlow's records.

    The CPU allocator of TensorFlow grows and collects no garbage (``process_state.cc``). Where a region begins is not
    recorded; it is the address of the first chunk in it. Raises :class:`TraceError`.
    """
    device = _RecordedAddresses()
    options = BFCOptions(allow_growth=True, garbage_collection=False)
    allocator = TensorFlowBFC(_LIMIT_BYTES, options, driver_alloc=device.alloc)
    addresses: dict[int, int | None] = {}
    try:
        for number, *allocation in read_gzipped_json(path)["events"]:
            if allocation:
                size, device.address = allocation
                if not fits(allocation, tuple[int, int]) or min(allocation) < 0:
                    raise ValueError("a size or address is no number of 63 bits")
                addresses[number] = allocator.malloc(size)
            else:
                allocator.free(addresses.pop(number, None))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a recording of TensorFlow's allocations: {error}") from None
    stats = allocator.stats()
    return stats["peak_bytes_in_use"], stats["peak_pool_bytes"]


class _RecordedAddresses:
    """Gives each new region the address at which the recording first used it."""

    def __init__(self) -> None:
        self.address = 0

    def alloc(self, size: int) -> int:
        return self.address
