"""Bytes that the kernels for packed weights, Marlin's and Machete's, and CUTLASS's for eight bits take beside their
output: sums in fp32 that thread blocks share out (csrc/quantization/{marlin,machete,w8a8} and csrc/moe/marlin_moe_wna16
of vllm 0.32.0)."""

from __future__ import annotations

#: Rows and columns of a thread block's share of sums (``max_thread_n``), and thread blocks of a multiprocessor that
#: there are locks for (``MARLIN_MAX_BLOCKS_PER_SM``).
_ROWS, _COLUMNS, BLOCKS = 64, 256, 4
#: Rows of the smallest tile of experts, which has its sums twice.
_SMALLEST = 8
#: Tokens from which Machete's tiles are the large ones (``machete/generate.py``): columns, and tokens by the weight's
#: shape, of a tile whose sums are in fp32.
_MACHETE_TOKENS, _MACHETE_COLUMNS, _MACHETE_TILES = 256, 128, (128, 256)
#: Inputs and columns up to which tiles are the narrower ones.
_MACHETE_INPUTS, _MACHETE_NARROW = 16384, 4096


def marlin_bytes(processors: int, tokens: int) -> int:
    """Of a product with so many rows (``marlin_gemm``), on so many multiprocessors."""
    return processors * min(-(-tokens // 16) * 16, _ROWS) * _COLUMNS * 4


def marlin_experts_bytes(processors: int, columns: int, tile: int, rows: int) -> int:
    """Of a product of experts, of so many ``rows`` in tiles of ``tile`` (``max_c_tmp_size``, ops.cu)."""
    values = min(columns * rows, processors * BLOCKS * tile * _COLUMNS)
    return 4 * values * (2 if tile == _SMALLEST else 1)


def machete_bytes(processors: int, tokens: int, inputs: int, columns: int) -> int:
    """Of ``machete_mm``: the sums of the last wave of tiles and the one before it, which all multiprocessors share out
    (CUTLASS, ``PersistentTileSchedulerSm90StreamKParams``), with two barriers of 32 bits each. Of few tokens, whose
    tiles are others, none."""
    if tokens <= _MACHETE_TOKENS:
        return 0
    rows = _MACHETE_TILES[not (inputs <= _MACHETE_INPUTS and columns <= _MACHETE_NARROW)]
    tiles = -(-columns // _MACHETE_COLUMNS) * -(-tokens // rows)
    waves, last = divmod(tiles, processors)
    shared = last + processors * min(1, waves) if last else 0
    return shared * rows * _MACHETE_COLUMNS * 4 + -(-shared * 8 // 128) * 128


#: A tile's sums in 32 bits, of two blocks, and their barrier, of CUTLASS's kernels for cards before Hopper
#: (``scaled_mm_c2x*``), as the wheel's own code asks for them; most tiles are 128 by 128.
_CUTLASS_SUMS, _CUTLASS_BARRIER = 2 * 128 * 128 * 4, 128
#: Rows up to which tiles are smaller; and columns, rounded up to a power of two, with tiles of twice the size on
#: compute capability 8.9: those of floating point, and those of integers.
_CUTLASS_ROWS, _CUTLASS_WIDE = 256, {False: (8192,), True: (8192, 32768)}


def cutlass_bytes(tokens: int, columns: int, *, integers: bool, by_width: bool) -> int:
    """Of a product of eight bits with so many rows, on a card whose tiles are chosen ``by_width`` or not."""
    wide = by_width and 1 << (columns - 1).bit_length() in _CUTLASS_WIDE[integers]
    return _CUTLASS_SUMS * (2 if wide and tokens > _CUTLASS_ROWS else 1) + _CUTLASS_BARRIER
