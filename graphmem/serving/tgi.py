"""Text Generation Inference: the memory left after one batch of prefills, less a tenth.

A formula that nothing holds, from text-generation-inference 3.3.6, ``server/text_generation_server/models/
flash_causal_lm.py`` (``warmup``) and ``utils/import_utils.py``: free memory after the largest batch of prefills, less
``1 - cuda_memory_fraction * 0.9`` of the card, in blocks of one token (flashinfer).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from graphmem.serving.base import Part
from graphmem.serving.logs import Reader, figure, settings_in
from graphmem.serving.options import DTYPE, QUANTIZATION, Option, one_of, share, whole
from graphmem.serving.shapes import CACHE_BYTES, Formula, Resolved

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
    shards = 1
    for line in lines:
        if "Args {" in line:
            found = settings_in(line.partition("Args {")[2]) | found
        elif match := re.search(r"`max_batch_prefill_tokens` to (\d+)", line):
            found.setdefault("max_batch_prefill_tokens", match[1])
        elif match := re.search(r"Shard ready in \S+ rank=(\d+)", line):
            shards = max(shards, int(match[1][:4]) + 1)
    found.setdefault("num_shard", str(shards))
    found = {name: re.sub(r"^Some\((.*)\)$", r"\1", text, flags=re.DOTALL).strip('"') for name, text in found.items()}
    found = {name: text.strip() for name, text in found.items()}
    return {name: text for name, text in found.items() if name in (*OPTIONS, "model_id") and text != "None"}


_READER = Reader(
    engine="tgi",
    begins=("Args {",),
    version=None,
    settings=_logged,
    model=("model_id",),
    options_lines=("Args {",),
    figures=(
        figure("blocks", "KV-cache blocks", r"KV-cache blocks: #", 0, min),
        figure("tokens", "max batch total tokens", r"Setting max batch total tokens to #", 0, min),
    ),
)


class TGI(Formula):
    """The engine."""

    name = "tgi"
    title = "Text Generation Inference"
    newest = "3.3"
    log = _READER
    options = OPTIONS
    advice = "give more cards (--num-shard), or quantised weights (--quantize)"
    notes = (
        "the launcher chooses the tokens of a prefill by the card's speed, which is not followed: "
        "{max_batch_prefill_tokens:,} are taken (--max-batch-prefill-tokens)",
    )

    def parts(self, start: Resolved) -> Iterator[Part]:
        """See :class:`graphmem.serving.shapes.Formula`."""
        prefill, fraction = start.found["max_batch_prefill_tokens"], start.found["cuda_memory_fraction"]
        yield Part("activations", start.own.activations(prefill, 1), f"a formula: {prefill} tokens of prefills")
        kept = round(start.device.capacity_bytes * (1 - fraction * _WIGGLE))
        yield Part("kept free", kept, f"cuda_memory_fraction {fraction:g}, and a tenth of it for graphs")


ENGINE: Any = TGI()
