"""Text Generation Inference: the memory left after one batch of prefills, less a tenth.

A formula that nothing holds, from text-generation-inference 3.3.6, ``server/text_generation_server/models/
flash_causal_lm.py`` (``warmup``) and ``utils/import_utils.py``: free memory after the largest batch of prefills, less
``1 - cuda_memory_fraction * 0.9`` of the card, in blocks of one token (flashinfer).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graphmem.serving.base import Part, Question, Served
from graphmem.serving.logs import Reader, said, settings_in
from graphmem.serving.options import DTYPE, QUANTIZATION, Option, one_of, share, whole
from graphmem.serving.shapes import CACHE_BYTES, Formula, filled, first_parts, outside

#: Defaults of launcher/src/main.rs; of tokens of a prefill where it does not choose by FLOPs.
OPTIONS = {
    "max_total_tokens": Option(whole(), "max_model_len"),
    "max_batch_prefill_tokens": Option(whole(), "max_num_batched_tokens", 4096),
    "max_concurrent_requests": Option(whole(), "max_num_seqs", 128),
    "cuda_memory_fraction": Option(share, default=1.0),
    "num_shard": Option(whole(1, 1024), "tensor_parallel_size", 1),
    "kv_cache_dtype": Option(one_of(*CACHE_BYTES), "kv_cache_dtype", "auto"),
    "quantize": QUANTIZATION,
    "dtype": DTYPE,
}
#: ``TGI_WIGGLE_ROOM``.
_WIGGLE = 0.9


def _logged(lines: Sequence[str]) -> dict[str, str]:
    """The launcher's ``Args``, as Rust prints them, and what it made of them."""
    found: dict[str, str] = {}
    for line in lines:
        if "Args {" in line:
            found = settings_in(line.partition("Args {")[2]) | found
        elif match := re.search(r"`max_batch_prefill_tokens` to (\d+)", line):
            found.setdefault("max_batch_prefill_tokens", match[1])
    found = {name: re.sub(r"^Some\((.*)\)$", r"\1", text, flags=re.DOTALL).strip('"') for name, text in found.items()}
    found = {name: text.strip() for name, text in found.items()}
    return {name: text for name, text in found.items() if name in (*OPTIONS, "model_id") and text != "None"}


_READER = Reader(
    engine="tgi",
    begins=("Args {",),
    version=None,
    settings=_logged,
    model=("model_id",),
    told=("Args {",),
    figures=(
        said("blocks", "KV-cache blocks", r"KV-cache blocks: #", 0, min),
        said("tokens", "max batch total tokens", r"Setting max batch total tokens to #", 0, min),
    ),
)


class TGI(Formula):
    """The engine."""

    name = "tgi"
    title = "Text Generation Inference"
    newest = "3.3"
    log = _READER
    options, cards, length, quantization = OPTIONS, "num_shard", "max_total_tokens", "quantize"

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        found, own, length = self.asked(question)
        cards, prefill = found["num_shard"], found["max_batch_prefill_tokens"]
        requests, fraction = found["max_concurrent_requests"], found["cuda_memory_fraction"]
        before = outside(question.device, cards)
        kept = round(question.device.capacity_bytes * (1 - fraction * _WIGGLE))
        parts = [
            *first_parts(before, own),
            Part("activations", own.activations(prefill, 1), f"a formula: {prefill} tokens of prefills"),
            Part("kept free", kept, f"cuda_memory_fraction {fraction:g}, and a tenth of it for graphs"),
        ]
        return filled(
            self, question, own, cards, parts=parts, page=1, length=length, requests=requests,
            token_bytes=own.token_bytes(CACHE_BYTES[found["kv_cache_dtype"]]),
            settings={
                "max_total_tokens": length, "max_batch_prefill_tokens": prefill, "max_concurrent_requests": requests,
                "cuda_memory_fraction": fraction, "num_shard": cards,
                "kv_cache_dtype": found["kv_cache_dtype"],
            },
            advice="give more cards (--num-shard), or quantised weights (--quantize)",
            basis="formula",
            notes=(
                "the launcher chooses the tokens of a prefill by the card's speed, which is not followed: "
                f"{prefill:,} are taken (--max-batch-prefill-tokens)",
            ),
        )  # fmt: skip


ENGINE: Any = TGI()
