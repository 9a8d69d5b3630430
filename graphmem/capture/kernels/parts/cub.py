"""Temporary storage that the CUB algorithms of CUDA 13.0 (CCCL 3.0) ask for, and where it is another under CUDA 12.

Sources: ``cub/device/dispatch/dispatch_radix_sort.cuh``, ``tuning/tuning_radix_sort.cuh``, ``tuning_scan.cuh``,
``tuning_unique_by_key.cuh`` and ``agent/single_pass_scan_operators.cuh``. PyTorch counts items in 64 bits.
"""

from __future__ import annotations

from graphmem.base import versions
from graphmem.capture.kernels.parts.script import Card

_ALIGNMENT = 256
#: A block may not use more shared memory than this (detail::max_smem_per_block).
_SHARED_MEMORY = 48 * 1024
_DIGITS = 256
_OFFSET = 8
_COUNTER = 4


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def storage(*sizes: int) -> int:
    """Bytes of AliasTemporaries: every part aligned, and room to align the first."""
    return sum(_aligned(size) for size in sizes) + _ALIGNMENT - 1


def _tile(threads: int, items_of_4_bytes: int, item_bytes: int) -> int:
    """RegBoundScaling: items per block, fewer if they are larger than 4 bytes."""
    items = max(1, items_of_4_bytes * 4 // max(4, item_bytes))
    return min(threads, -(-(_SHARED_MEMORY // (item_bytes * items)) // 32) * 32) * items


def _onesweep_tile(key: int, value: int, policy: int) -> int:
    """Items per block of the one-sweep kernel; ``value`` is 0 when only keys are sorted."""
    widest = max(key, value)
    if policy < 800:
        return _tile(256, 46 if key == value == 4 else 23, widest)
    if policy < 900:
        return _tile(384, 17 if key == 4 and value else 21, widest)
    if key >= 8:
        return _tile(384, 24 if value >= 8 else 30, widest)
    if key == 4:
        return _tile(384, 19 if not value else 29 if value >= 8 else 17, widest)
    threads, items = {(1, 8): (384, 18), (2, 8): (512, 23), (1, 4): (512, 14), (2, 4): (512, 12)}.get(
        (key, value), (512, 19)
    )
    return _tile(threads, items, widest)


def radix_sort_bytes(items: int, key: int, value: int, bits: int, card: Card, floating: bool = False) -> int:
    """DeviceRadixSort::SortPairs, or SortKeys if ``value`` is 0 (sizes in bytes) on the lowest ``bits`` of the keys.
    ``floating``: the keys are floating-point numbers.

    Keys of 1 or 2 bytes take another kernel before the policy of 9.0, whose histograms depend on the occupancy;
    they are left out there.
    """
    if items <= _tile(256, 19, max(key, value)):
        return 1
    passes = -(-bits // 8)
    extra = (items * key, items * value) if passes > 1 else (0, 0)
    policy = card.limits.cub_sort
    if key < 4 and policy < 900:
        return storage(items * key, items * value)
    tile = _onesweep_tile(key, value, policy)
    if floating and key == 4 and not value and policy >= 900:
        tile = _tile(384, 18, 4)  # observed on 9.0
    portion = (2**28 - 1) // tile * tile
    portions = -(-items // portion)
    blocks = -(-min(items, portion) // tile)
    return storage(
        portions * passes * _DIGITS * _OFFSET, blocks * _DIGITS * _COUNTER, *extra, portions * passes * _COUNTER
    )


def segmented_sort_bytes(items: int, key: int, value: int) -> int:
    """DeviceSegmentedRadixSort::SortPairs."""
    return storage(items * key, items * value)


def _states(items: int, tile: int, state: int, card: Card) -> int:
    """Storage of a single pass: a state for each tile, and 32 to pad the front. CUDA 13 aligns the three arrays that
    it could be (``tile_state_allocation_size``), CUDA 12 asked for the one's bytes (``ScanTileState<T, true>``)."""
    size = (-(-items // tile) + 32) * state
    return size if _is_of_cuda_12(card) else storage(size)


def _is_of_cuda_12(card: Card) -> bool:
    return not versions.CUB_ALIGNS_TILE_STATES.holds(card.torch_version)


def _tile_states(items: int, tile: int, state: int, card: Card) -> int:
    """The same where it is the one temporary of an algorithm that has room for others."""
    return storage(_states(items, tile, state, card))


def scan_bytes(items: int, value: int, card: Card) -> int:
    """DeviceScan: running sums; 128 threads with 15 items of 4 bytes. Values of 2 bytes are observed (9.0)."""
    if value == 2:
        return _tile_states(items, 512 * 15, 16, card)
    return _tile_states(items, 128 * max(1, 15 * 4 // max(4, value)), 2 * max(4, value), card)


#: Items a block of DeviceSelect takes, by size of the value, and for 2-byte floating-point values. Observed on 9.0.
_SELECT_TILES = {1: 512 * 11, 2: 512 * 11, 4: 384 * 17, 8: 192 * 22, 16: 96 * 22}
_SELECT_TILE_HALF = 128 * 10
#: Items a block takes that numbers the runs of equal values. Observed on 9.0.
_RUN_TILE = 6144


def select_bytes(items: int, value: int, card: Card, half: bool = False) -> int:
    """DeviceSelect::Flagged and DeviceSelect::Unique."""
    return _tile_states(items, _SELECT_TILE_HALF if half else _SELECT_TILES[value], 8, card)


def run_lengths_bytes(items: int) -> int:
    """DeviceRunLengthEncode::Encode with 64-bit lengths: 128 threads with 6 items of any size. Observed on 9.0, under
    CUDA 12 too."""
    return storage((-(-items // (128 * 6)) + 32) * 16)


# --- Thrust's, on 64-bit positions of slices that are compared through a pointer; observed on 9.0 up to 10^8 slices ---


def sorted_positions_bytes(items: int, card: Card) -> int:
    """thrust::sort, DeviceMergeSort of keys: a second array, and the bounds of tiles."""
    return storage(items * _OFFSET, _bounds_of_tiles(items, card))


def sorted_pairs_bytes(items: int, card: Card) -> int:
    """thrust::sort_by_key of 64-bit keys and values: second arrays of both, and the bounds of tiles. Observed from 7.5
    to 12.0 up to 4 * 10^6 pairs."""
    return storage(items * _OFFSET, items * _OFFSET, _bounds_of_tiles(items, card))


def _bounds_of_tiles(items: int, card: Card) -> int:
    """Of 256 threads with 16 items each; under CUDA 12 the 8 that 17 items of 4 bytes make."""
    tile = 256 * (8 if _is_of_cuda_12(card) else 16)
    return (1 + -(-items // tile)) * _OFFSET


def unique_positions_bytes(items: int, card: Card) -> int:
    """thrust::unique: 128 threads with 5 items, and the number selected; of CUDA 13.2 DeviceSelect::Unique and that."""
    if versions.THRUST_UNIQUE_BY_CUB.holds(card.torch_version):
        return storage(select_bytes(items, _OFFSET, card), _OFFSET)
    return storage(_states(items, 128 * 5, 16, card), _OFFSET)


def counted_positions_bytes(items: int, card: Card) -> int:
    """thrust::unique_by_key: twice the tile of DeviceSelect::UniqueByKey, and the number selected; as many as unique up
    to CUDA 12.4. Observed from 7.5 to 12.0 up to 4 * 10^6 items."""
    tile = 128 * 5
    if versions.CUB_COUNTS_UNIQUE_IN_64_BITS.holds(card.torch_version):
        tile = 2 * _unique_tile(8, card)
    return storage(_states(items, tile, 16, card), _OFFSET)


def position_sums_bytes(items: int, card: Card) -> int:
    """thrust::inclusive_scan: 128 threads with 21 items; under CUDA 12 as every DeviceScan."""
    if _is_of_cuda_12(card):
        return scan_bytes(items, _OFFSET, card)
    return _tile_states(items, 128 * 21, 16, card)


#: thrust::adjacent_difference.
DIFFERENCE_BYTES = storage()


def run_numbers_bytes(items: int, card: Card) -> int:
    """DeviceScan over flags that are made on the way, into 64-bit numbers; of 32 bits under CUDA 12."""
    if _is_of_cuda_12(card):
        return scan_bytes(items, 4, card)
    return storage((-(-items // _RUN_TILE) + 32) * 16)


def scan_by_key_bytes(items: int) -> int:
    """DeviceScan::InclusiveSumByKey on 32-bit keys and values. Observed up to 5,000 items; larger is a guess. Under
    CUDA 12 the same was seen, of 1,024 and 8,192 items."""
    return storage(storage((-(-items // 2304) + 32) * 16))


def unique_by_key_bytes(items: int, key: int, card: Card) -> int:
    """DeviceSelect::UniqueByKey with values of the keys' size; up to CUDA 12.4 counted in 32 bits."""
    state = 16 if versions.CUB_COUNTS_UNIQUE_IN_64_BITS.holds(card.torch_version) else 8
    return _tile_states(items, _unique_tile(key, card), state, card)


def _unique_tile(key: int, card: Card) -> int:
    policy = card.limits.cub_unique
    if policy >= 900:
        return 448 * 11 if key == 8 else 512 * 14
    if policy >= 800:
        return 192 * 7 if key == 8 else 256 * 11
    return 64 * (5 if key == 8 else 11)
