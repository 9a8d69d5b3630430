"""Products with packed weights: their output, and what Marlin's and Machete's kernels take beside it."""

from __future__ import annotations

from graphmem.base import packed_products
from graphmem.serving.vllm.run import Run, Tensor


def marlin_locks(run: Run) -> None:
    """Locks that stay, one set a stream. Asking for them makes the engine leave the default stream for good
    (utils/torch_utils.py, ``current_stream``)."""
    run.leave_default_stream()
    run.once("marlin locks", run.device.sm_count * packed_products.BLOCKS * 4)


def marlin_product(run: Run, tokens: int, size: int) -> Tensor:
    """``marlin_gemm``: locks, the output of ``size`` bytes, and sums."""
    marlin_locks(run)
    result = run.new(size)
    run.temporary(packed_products.marlin_bytes(run.device.sm_count, tokens))
    return result


def marlin_sums(run: Run, columns: int, tile: int, rows: int) -> None:
    """The sums of a product of experts, of so many ``rows`` in tiles of ``tile``."""
    run.temporary(packed_products.marlin_experts_bytes(run.device.sm_count, columns, tile, rows))


def machete_product(run: Run, tokens: int, inputs: int, columns: int, size: int) -> Tensor:
    """``machete_mm``: the output of ``size`` bytes, and sums."""
    result = run.new(size)
    if sums := packed_products.machete_bytes(run.device.sm_count, tokens, inputs, columns):
        run.temporary(sums)
    return result
