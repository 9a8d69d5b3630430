"""Marlin's and Machete's kernels for packed weights: what a product takes beside its output
(csrc/quantization/{marlin,machete} and csrc/moe/marlin_moe_wna16 of vllm 0.32.0)."""

from __future__ import annotations

from graphmem.serving.vllm.run import Run, Tensor

#: Rows and columns of a thread block's share of sums in fp32 (``max_thread_n``), and thread blocks of a multiprocessor
#: that there are locks for (``MARLIN_MAX_BLOCKS_PER_SM``).
_ROWS, _COLUMNS, _BLOCKS = 64, 256, 4
#: Rows of the smallest tile of experts, which has its sums twice.
_SMALLEST = 8
#: Tokens from which Machete's tiles are the large ones (``machete/generate.py``): columns, and tokens by the weight's
#: shape, of a tile whose sums are in fp32.
_MACHETE_TOKENS, _MACHETE_COLUMNS, _MACHETE_TILES = 256, 128, (128, 256)
#: Inputs and columns up to which tiles are the narrower ones.
_MACHETE_INPUTS, _MACHETE_NARROW = 16384, 4096


def marlin_locks(run: Run) -> None:
    """Locks that stay, one set a stream. Asking for them makes the engine leave the default stream for good
    (utils/torch_utils.py, ``current_stream``)."""
    run.leave_default_stream()
    run.once("marlin locks", run.device.sm_count * _BLOCKS * 4)


def marlin_product(run: Run, tokens: int, size: int) -> Tensor:
    """``marlin_gemm``: locks, the output of ``size`` bytes, and sums."""
    marlin_locks(run)
    result = run.new(size)
    rows = min(-(-tokens // 16) * 16, _ROWS)
    run.temporary(run.device.sm_count * rows * _COLUMNS * 4)
    return result


def marlin_sums(run: Run, columns: int, tile: int, rows: int) -> None:
    """The sums of a product of experts, of so many ``rows`` in tiles of ``tile`` (``max_c_tmp_size``,
    csrc/moe/marlin_moe_wna16/ops.cu)."""
    values = min(columns * rows, run.device.sm_count * _BLOCKS * tile * _COLUMNS)
    run.temporary(4 * values * (2 if tile == _SMALLEST else 1))


def machete_product(run: Run, tokens: int, inputs: int, columns: int, size: int) -> Tensor:
    """``machete_mm``: the output of ``size`` bytes, and the sums of the last wave of tiles and the one before it, which
    all multiprocessors share out (CUTLASS, ``PersistentTileSchedulerSm90StreamKParams``), with two barriers of 32 bits
    each. Of few tokens, whose tiles are others, nothing."""
    result = run.new(size)
    if tokens <= _MACHETE_TOKENS:
        return result
    rows = _MACHETE_TILES[not (inputs <= _MACHETE_INPUTS and columns <= _MACHETE_NARROW)]
    tiles, processors = -(-columns // _MACHETE_COLUMNS) * -(-tokens // rows), run.device.sm_count
    waves, last = divmod(tiles, processors)
    if last:
        shared = last + processors * min(1, waves)
        run.temporary(shared * rows * _MACHETE_COLUMNS * 4 + -(-shared * 8 // 128) * 128)
    return result
