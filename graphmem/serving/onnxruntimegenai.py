"""ONNX Runtime GenAI: past and present share one buffer of the longest sequence.

A formula that nothing holds, from microsoft/onnxruntime-genai, ``src/models/kv_cache.cpp`` and ``src/config.h``: with
``past_present_share_buffer`` each layer keeps [batch * beams, heads of keys, max_length, size of a head] twice; without
it past and present are both there while a token is made. Weights are those of the configuration; activations and the
arena's rounding are not counted (``graphmem analyze model.onnx`` follows them).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphmem.serving.base import Question, Served
from graphmem.serving.options import DTYPE, QUANTIZATION, Option, flag, whole
from graphmem.serving.shapes import Formula, Resolved
from graphmem.units import GIB

OPTIONS = {
    "max_length": Option(whole(), "max_model_len"),
    "batch_size": Option(whole(1, 1 << 16), "max_num_seqs", 1),
    "num_beams": Option(whole(1, 1 << 10), default=1),
    "past_present_share_buffer": Option(flag, default=True),
    "quantization": QUANTIZATION,
    "dtype": DTYPE,
}


class OnnxRuntimeGenAI(Formula):
    """The engine."""

    name = "onnxruntimegenai"
    title = "ONNX Runtime GenAI"
    newest = "0.16"
    options = OPTIONS
    advice = "give quantised weights, or a larger card"
    notes = ("activations, the arena's rounding and cuDNN's workspaces are not counted",)

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        answer = super().serve(question)
        return _asked(answer, int(answer.settings["batch_size"]) * int(answer.settings["max_length"]))

    def token_bytes(self, start: Resolved) -> int:
        """Of all beams; past and present are two where they do not share a buffer."""
        copies = 1 if start.found["past_present_share_buffer"] else 2
        return super().token_bytes(start) * int(start.found["num_beams"]) * copies


def _asked(answer: Served, tokens: int) -> Served:
    """The engine takes the buffer that it is asked for, not the rest of the card."""
    cache = answer.kv_cache
    refusal = answer.refusal
    if refusal is None and tokens > cache.tokens:
        needed = tokens * cache.block_bytes
        refusal = (
            f"the cache of {tokens:,} tokens takes {needed / GIB:.2f} of {cache.available_bytes / GIB:.2f} GiB left on "
            f"{answer.gpu}; --max-length {cache.tokens // int(answer.settings['batch_size'])} would fit"
        )
    held = replace(cache, blocks=tokens, tokens=tokens, concurrency=float(answer.settings["batch_size"]))
    length = int(answer.settings["max_length"])
    return replace(
        answer, kv_cache=held if refusal is None else cache, refusal=refusal, request_blocks=lambda _: length
    )


ENGINE: Any = OnnxRuntimeGenAI()
