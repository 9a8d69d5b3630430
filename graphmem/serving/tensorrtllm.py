"""TensorRT-LLM: a share of the memory free once the engine is loaded.

A formula: pages of the cache are ``free_gpu_memory_fraction`` of the free memory, as the engine's logs print it
(cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp; 1.0). That arithmetic public logs hold, given what was free; weights
and activations, which decide what is free, nothing holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from graphmem.serving.base import Part, Question, Served
from graphmem.serving.logs import Log, Reader, figure, last, settings_in
from graphmem.serving.options import DTYPE, QUANTIZATION, Option, one_of, share, whole
from graphmem.serving.shapes import CACHE_BYTES, Formula, Resolved, with_pool
from graphmem.units import MIB

#: Defaults as its logs print them where nothing is said; pages were of 64 tokens before.
OPTIONS = {
    "free_gpu_memory_fraction": Option(share, default=0.9),
    "max_seq_len": Option(whole(), "max_model_len"),
    "max_batch_size": Option(whole(), "max_num_seqs", 2048),
    "max_num_tokens": Option(whole(), "max_num_batched_tokens", 8192),
    "tokens_per_block": Option(whole(1, 1 << 12), "block_size", 32),
    "kv_cache_dtype": Option(one_of(*CACHE_BYTES), "kv_cache_dtype", "auto"),
    "tp_size": Option(whole(1, 1024), "tensor_parallel_size", 1),
    "quantization": QUANTIZATION,
    "dtype": DTYPE,
}
#: Other spellings: of Triton's backend, of trtllm-serve and of the Python API.
SHORT = {
    "kv_cache_free_gpu_mem_fraction": "free_gpu_memory_fraction", "tensor_parallel_size": "tp_size", "tp": "tp_size",
    "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
}  # fmt: skip
#: Settings in words of its logs: ``TRTGptModel maxBatchSize: 8``.
_WORDS = {
    "maxBatchSize": "max_batch_size", "maxNumTokens": "max_num_tokens", "maxSequenceLen": "max_seq_len",
    "Number of tokens per block": "tokens_per_block",
}  # fmt: skip
#: What other lines tell: of the runtime that is PyTorch's, and of trtllm-bench's summary.
_BESIDE = (
    (re.compile(r"fraction is set (\d\.\d+)"), "free_gpu_memory_fraction"),
    (re.compile(r"KV Memory Percentage: +(\d+\.\d+)%"), "memory_percentage"),
    (re.compile(r"KV Cache Dtype: +(\w+)"), "kv_cache_dtype"),
    (re.compile(r"^Model: +(\S+/\S+)"), "model"),
)


def _logged(lines: Sequence[str]) -> dict[str, str]:
    """Settings of trtllm-serve's arguments, and of what the runtime prints of the engine's file."""
    found: dict[str, str] = {}
    for line in lines:
        for words, name in _WORDS.items():
            if match := re.search(re.escape(words) + r": (\d+)", line):
                found.setdefault(name, match[1])
        if "KvCacheConfig(" in line or "LlmArgs(" in line:
            found |= settings_in(line)
        for expression, name in _BESIDE:
            if match := expression.search(line):
                found.setdefault(name, match[1].lower())
    if float(found.get("memory_percentage", 0)) > 0:
        found.setdefault("free_gpu_memory_fraction", f"{float(found['memory_percentage']) / 100:g}")
    names = (*OPTIONS, *SHORT, "model")
    return {name: text for name, text in found.items() if name in names and text != "auto"}


def _adds_up(log: Log) -> dict[str, float]:
    """The pool as its share of what was free, and its tokens by blocks."""
    printed = {name: one.value for name, one in log.printed.items()}
    found = {}
    if "available" in printed:
        found["KV buffer"] = printed["available"] * float(log.settings.get("free_gpu_memory_fraction", 0.9))
    if "blocks" in printed and "tokens_per_block" in log.settings:
        found["tokens"] = printed["blocks"] * float(log.settings["tokens_per_block"])
    return found


_READER = Reader(
    engine="tensorrtllm",
    begins=("TensorRT-LLM version:", "Loaded engine size"),
    version=re.compile(r"TensorRT-LLM (?:version: |LLM version: )(\d+\.\d+[\w.]*)"),
    settings=_logged,
    adds_up=_adds_up,
    total=(re.compile(r"paged kv cache: total: (\d+\.\d+) GiB"),),
    options_lines=("KvCacheConfig(", "LlmArgs(", "fraction is set", "KV Memory Percentage", "free_gpu_memory_fraction"),
    figures=(
        figure("weights", "Loaded engine size", r"Loaded engine size: # MiB", MIB),
        figure("KV buffer", "in paged KV cache", r"Allocated # GiB for max tokens in paged KV cache", worst=last),
        figure("tokens", "in paged KV cache", r"max tokens in paged KV cache \(#\)", 0, last),
        figure("tokens", "in paged KV cache", r"Using # tokens in paged KV cache", 0, last),
        figure("tokens", "in paged KV cache", r"Max tokens in paged KV cache: #\b", 0, last),
        figure("available", "calculating max tokens in paged kv cache", r"available: # GiB", worst=last),
        figure("blocks", "KV cache primary pool", r"blocks in KV cache primary pool: #", 0, min),
        figure("blocks", "primary blocks=", r"primary blocks=#", 0, last),
    ),
)


class TensorRTLLM(Formula):
    """The engine."""

    name = "tensorrtllm"
    has_benchmarks = True
    title = "TensorRT-LLM"
    newest = "1.0"
    log = _READER
    options, short, keeps_to_length = OPTIONS, SHORT, False
    advice = "give more cards (--tp), or quantised weights"
    notes = (
        "only the share of free memory, its pages and tokens are held by public logs; weights, activations and "
        "workspaces, which decide what is free, are formulas",
    )

    def parts(self, start: Resolved) -> Iterator[Part]:
        """See :class:`graphmem.serving.shapes.Formula`."""
        tokens, fraction = start.found["max_num_tokens"], start.found["free_gpu_memory_fraction"]
        rows = min(start.found["max_batch_size"], tokens)
        peak = start.own.activations(tokens, rows)
        free = start.device.capacity_bytes - start.context - start.own.weights_bytes - peak
        yield Part("activations", peak, f"a formula: {tokens} tokens, {rows} rows of logits")
        yield Part("kept free", max(0, free - pool_bytes(free, fraction)), f"free_gpu_memory_fraction {fraction:g}")

    def with_available(self, question: Question, served: Served, free: int) -> Served:
        """The answer where so many bytes were free once the engine was loaded."""
        return with_pool(served, pool_bytes(free, served.settings["free_gpu_memory_fraction"]))


def pool_bytes(free: int, fraction: float) -> int:
    """Bytes of the cache where so many are free."""
    return max(0, int(free * fraction))


ENGINE: Any = TensorRTLLM()
