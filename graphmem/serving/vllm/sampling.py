"""The sampler when requests ask for all it has (vllm 0.33.0, v1/worker/gpu/sample/{sampler,logprob}.py and
v1/sample/ops/topk_topp_triton.py)."""

from __future__ import annotations

from graphmem.serving.vllm.layers import VOCAB_PADDING, cdiv
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.trace import Category

#: Log probabilities that the profile run asks for (``SamplingParams.for_sampler_warmup``).
_LOGPROBS = 5
#: Entries of both tables of the kernel for top-k and top-p, in fp32.
_TABLE = 200
#: TensorTopK.cu: threads of a block, the least and the most items a thread takes, registers of a thread, and digits.
_THREADS, _LEAST, _MOST, _REGISTERS, _DIGITS = 256, 4, 64, 40, 256
#: Of a scan of sums by key, of up to some ten thousand.
_SCAN = 1279
#: Registers of a multiprocessor.
_SM_REGISTERS = 65536


def processed_logits(run: Run, rows: int, vocab: int) -> tuple[list[Tensor], list[Tensor]]:
    """(logits in fp32 that penalties and temperatures change, limits of rows). Top-k and top-p are in place, by a
    kernel whose buffer of a row for each multiprocessor stays."""
    wide = run.new(rows * vocab * 4, "logits in fp32")
    limits = [run.new(rows * 4) for _ in range(2)]
    programs = min(run.device.sm_count, rows)
    kept = min(1 << (programs - 1).bit_length(), run.device.sm_count)
    for size in (kept * vocab * 4, _TABLE * 4, _TABLE * 4):
        run.new(size, "top-k and top-p buffer", Category.WORKSPACE)
    return [wide], limits


def log_probabilities(run: Run, rows: int, vocab: int, logits: Tensor) -> None:
    """The likeliest of the model's own logits, which are copied where they are part of wider rows."""
    itemsize = logits.bytes // (rows * cdiv(vocab, VOCAB_PADDING) * VOCAB_PADDING)
    chosen = [run.new(rows * _LOGPROBS * size) for size in (itemsize, 8)]
    copied = [run.new(rows * vocab * itemsize)] if vocab % VOCAB_PADDING else []
    run.temporary(*_selection(rows, vocab, itemsize, run.device.sm_count))
    run.free(*copied, *chosen)


def _selection(rows: int, length: int, itemsize: int, processors: int) -> list[int]:
    """The buffers of ``torch.topk`` of long rows, all there at once (``sbtopk``'s are none, TensorTopK.cu)."""
    blocks = _SM_REGISTERS // (_REGISTERS * _THREADS)
    items = cdiv(rows * length, processors * blocks * _THREADS)
    parts = rows * cdiv(length, max(_LEAST, min(items, _MOST)) * _THREADS)
    digits = [parts * _DIGITS * 2, rows * _DIGITS * 4]
    return [rows * itemsize, rows * 8, rows * 2 * max(4, itemsize), *digits, parts * 4, parts * 4, _SCAN]
