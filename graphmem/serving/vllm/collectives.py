"""What the engine's own sums over cards keep on each card (vllm 0.32.0, distributed/device_communicators).

They are made before the engine looks at the card the first time, so that nothing is charged for them: they are in use
as the CUDA context is.
"""

from __future__ import annotations

from graphmem.devices import Device
from graphmem.units import MIB, format_bytes

#: Cards that ``CustomAllreduce`` is for, the largest sum, the room for scattered ones, and pointers of all ranks
#: (custom_all_reduce.py).
_RANKS, _SUM, _SCATTERED, _POINTERS = (2, 4, 6, 8, 16), 8 * MIB, 16 * MIB, 8 * MIB
#: By compute capability and ranks: the largest sum where symmetric memory has larger ones
#: (``CUSTOM_ALL_REDUCE_MAX_SIZES``), and what that takes (``SYMM_MEM_ALL_REDUCE_MAX_SIZES``, all_reduce_utils.py).
_LARGEST = {
    (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: MIB // 2, 8: MIB // 4}, (10, 0): {2: 2 * MIB, 4: 2 * MIB, 6: MIB, 8: MIB}
}  # fmt: skip
_SYMMETRIC = {
    (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
    (10, 0): {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
}  # fmt: skip


def in_words(device: Device, ranks: int) -> str | None:
    """What they take on a card among so many, as a sentence; None where there are none."""
    if ranks not in _RANKS:
        return None
    largest = min(_SUM, _LARGEST.get(device.capability, {}).get(ranks, _SUM))
    symmetric = _SYMMETRIC.get(device.capability, {}).get(ranks, 0)
    beside = f", and {format_bytes(symmetric)} of symmetric memory" if symmetric else ""
    return (
        f"the engine's own sums over {ranks} cards that reach each other's memory keep "
        f"{format_bytes(largest + _SCATTERED + _POINTERS)} on each{beside}: in use before it looks, so not charged, "
        "and not counted here, as FlashInfer's sums are not"
    )
