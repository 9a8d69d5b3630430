"""SGLang: a static share of the card for weights and cache.

Followed from sglang 0.5.23, ``srt/arg_groups/memory_hook.py`` (defaults), ``srt/mem_cache/kv_cache_configurator.py``:
tokens = (free after loading - free before it * (1 - mem_fraction_static)) / bytes of a token. Its arithmetic and the
weights are held by public logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.devices import Device
from graphmem.serving.base import Part, Question, Served, ServedModel
from graphmem.serving.caches import language
from graphmem.serving.installed import BASES, AskedFirst
from graphmem.serving.logs import Log, Reader, figure, settings_in, whole_number
from graphmem.serving.options import DTYPE, QUANTIZATION, Option, flag, one_of, ratio, share, whole
from graphmem.serving.sglang import installed
from graphmem.serving.sglang.scheduler import following
from graphmem.serving.shapes import CACHE_BYTES, Formula, Resolved, with_pool
from graphmem.serving.stored import FAMILIES, matrices
from graphmem.serving.values import count
from graphmem.units import GIB, MIB

OPTIONS = {
    "mem_fraction_static": Option(share),
    "context_length": Option(whole(), "max_model_len"),
    "max_running_requests": Option(whole(), "max_num_seqs"),
    "max_total_tokens": Option(whole()),
    "chunked_prefill_size": Option(whole(-1)),
    "kv_cache_dtype": Option(one_of(*CACHE_BYTES), "kv_cache_dtype", "auto"),
    "tp_size": Option(whole(1, 1024), "tensor_parallel_size", 1),
    "page_size": Option(whole(1, 1 << 12), "block_size", 1),
    "quantization": QUANTIZATION,
    "dtype": DTYPE,
    "cuda_graph_max_bs": Option(whole()),
    "disable_cuda_graph": Option(flag),
    "max_prefill_tokens": Option(whole(), default=16384),
    "mamba_full_memory_ratio": Option(ratio, default=0.9),
    "max_mamba_cache_size": Option(whole()),
    "swa_full_tokens_ratio": Option(share, default=0.8),
    "disable_radix_cache": Option(flag),
    "disable_overlap_schedule": Option(flag),
    "basis": Option(one_of(*BASES), "", BASES[0]),
}
#: Other spellings.
SHORT = {"tp": "tp_size", "tensor_parallel_size": "tp_size"}
#: Cards up to so many MiB: tokens of a prefill's chunk, largest batch of CUDA graphs on fewer than four cards, on more.
#: ``srt/arg_groups/memory_hook.py`` of 0.5.23, "GPU-dependent capacity defaults"; in 0.5.6 (``srt/server_args.py``,
#: ``_handle_gpu_memory_settings``) cards from 20 to 35 GiB had 2,048, 24 and 80, the others the same.
_BY_MEMORY = (
    (20 * 1024, 2048, 8, 8), (35 * 1024, 4096, 48, 160), (60 * 1024, 4096, 32, 160), (160 * 1024, 8192, 256, 512),
)  # fmt: skip
_LARGEST = (16384, 512, 512)
#: Models whose layers with a window have a pool of their own (``is_hybrid_swa_model``, srt/configs/model_config.py).
_WINDOWED = ("gpt_oss", "gemma4_text", "llama4_text")
#: Products that lie in one tensor (``QKVParallelLinear``, ``MergedColumnParallelLinear``, srt/layers/linear.py).
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
          "w1": "gate_up", "w3": "gate_up"}  # fmt: skip


#: The month from which the default fraction goes by the card, and the fractions before it by cards, of tensors
#: (``srt/server_args.py`` of 0.3 to 0.4.8).
_BY_CARD, _DATE = "2025-07", re.compile(r"\[(20\d\d-\d\d)-\d\d ")
_FRACTIONS = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))


def _logged(lines: Sequence[str]) -> dict[str, str]:
    """All of ``ServerArgs``, and what the scheduler made of them, which other lines tell."""
    found: dict[str, str] = {}
    for line in lines:
        if match := re.search(r"ServerArgs[(:]", line):
            found = settings_in(line[match.end() :]) | found
        elif "max_total_num_tokens=" in line:
            made = settings_in(line)
            found |= {name: made[name] for name in ("chunked_prefill_size", "max_running_requests") if name in made}
            found |= {"context_length": made["context_len"]} if "context_len" in made else {}
    names = (*OPTIONS, *SHORT, "model_path")
    return {name: text for name, text in found.items() if name in names and text != "auto"}


def _usual(lines: Sequence[str], settings: Mapping[str, str]) -> dict[str, str]:
    """The default fraction of a log's day."""
    date = next((match[1] for match in map(_DATE.search, lines) if match), _BY_CARD)
    cards = whole_number(settings.get("tp_size", settings.get("tensor_parallel_size", "1"))) or 1
    usual = next(share for least, share in _FRACTIONS if cards >= least)
    return {"mem_fraction_static": str(usual)} if date < _BY_CARD else {}


def _adds_up(log: Log) -> dict[str, float]:
    """The pool: what is free once the weights are there, less the part that is kept free of what was there before, and
    the states of sequences; or by its share beside those."""
    printed = {name: one.value for name, one in log.printed.items()}
    fraction = float(log.settings.get("mem_fraction_static", 0))
    states = printed.get("states", 0) + printed.get("convolved", 0)
    if fraction and "available" in printed:
        before = log.free_bytes or printed["available"] + printed.get("weights", 0)
        return {"KV buffer": printed["available"] - before * (1 - fraction) - states}
    is_given = {"max_mamba_cache_size", "disable_radix_cache"} & set(log.settings)
    times = float(log.settings.get("mamba_full_memory_ratio", OPTIONS["mamba_full_memory_ratio"].default))
    return {"KV buffer": states / times} if states and not is_given else {}


_READER = Reader(
    engine="sglang",
    begins=("server_args=ServerArgs(",),
    version=re.compile(r"sglang(?: version|==)[ =:v]*(\d+\.\d+[\w.]*)"),
    settings=_logged,
    model=("model_path",),
    adds_up=_adds_up,
    usual=_usual,
    options_lines=("ServerArgs(",),
    sums={"weights": ("weights", "beside the weights")},
    free=re.compile(r"Load weight begin\. avail mem=(\d+\.\d+) GB"),
    figures=(
        figure("weights", "Load weight end", r"mem usage=# GB"),
        figure("available", "Load weight end", r"avail mem=# GB", worst=min),
        figure("KV buffer", "K size:", r"\bK size: # GB", 2 * GIB),
        figure("KV buffer", "KV size:", r"KV size: # GB"),
        figure("states", "ssm_state size", r"ssm_state size: #GB"),
        figure("convolved", "conv_state size", r"conv_state size: #GB"),
        figure("tokens", "max_total_num_tokens=", r"max_total_num_tokens=#", 0, min),
        figure("tokens", "#tokens:", r"\x23tokens: #", 0, min),
    ),
)


class SGLang(AskedFirst, Formula):
    """The engine."""

    name = "sglang"
    has_benchmarks = True
    title = "SGLang"
    newest = "0.5"
    log = _READER
    options, short, accepted, basis = OPTIONS, SHORT, FAMILIES, "logs"
    advice = "raise --mem-fraction-static, or give more cards (--tp)"
    notes = (
        "twelve public logs: tokens within 1.7 %, given what was free before loading; activations and graphs are what "
        "--mem-fraction-static keeps free, and are not predicted",
        "the default fraction is that of 0.5.23; older versions had no graphs of prefills, and 0.88 on an H100",
    )

    def why_not(self, question: Question) -> str | None:
        """See :class:`graphmem.serving.installed.AskedFirst`."""
        return installed.why_not(question)

    def by_itself(self, question: Question) -> Served:
        """See :class:`graphmem.serving.installed.AskedFirst`."""
        return installed.serve(question)

    def retold(self, question: Question) -> Served:
        """See :class:`graphmem.serving.installed.AskedFirst`."""
        start = Resolved(self, question)
        found, own, model = start.found, start.own, question.model
        chunk, graphs = _batches(start)
        has_graphs = not found.get("disable_cuda_graph")
        prefills = _prefill_graphs_mib(model, chunk) if has_graphs else 0
        fraction = found.get("mem_fraction_static") or default_fraction(
            start.device, start.cards, chunk, graphs, prefills
        )
        free, token = start.device.capacity_bytes - start.context, self.token_bytes(start)
        plain = model.checkpoint is None and not found.get("quantization")
        beside, kept = beside_weights(model, start.cards) if plain else 0, round(free * (1 - fraction))
        parts = [
            *start.first,
            Part("beside the weights", beside, "blocks of the allocator, and the rotary table in fp32"),
            Part("kept free", kept, f"mem_fraction_static {fraction:g}: activations, graphs"),
        ]
        left = free - own.weights_bytes - beside - kept
        if states := _states(left, own.cached.states, found):
            parts.append(Part("states", states, f"mamba_full_memory_ratio {found['mamba_full_memory_ratio']:g}"))
            left -= states
        tokens = max(0, left // token)
        if found.get("max_total_tokens", tokens) < tokens:
            tokens = found["max_total_tokens"]
            parts.append(Part("not asked for", left - tokens * token, "max_total_tokens"))
        requests = found.get("max_running_requests") or max(min(int(tokens / start.length * 512), 4096), 2048)
        requests = max(1, min(requests, tokens // 2))
        settings = {
            "mem_fraction_static": fraction, "context_length": start.length, "max_running_requests": requests,
            "chunked_prefill_size": chunk, "cuda_graph_max_bs": graphs, "tp_size": start.cards,
            "page_size": found["page_size"], "kv_cache_dtype": found["kv_cache_dtype"],
            "max_prefill_tokens": found["max_prefill_tokens"],
            **{name: found[name] for name in ("disable_radix_cache", "disable_overlap_schedule") if found.get(name)},
        }  # fmt: skip
        size = 4 * (requests + 1) * (start.length + 4)
        served = self.filled(start, parts, token, requests, settings)
        table = f"of what is kept free the table of requests' tokens takes {size / MIB:,.0f} MiB"
        is_plain = not own.cached.states and not own.cached.windowed  # one pool, as the scheduler is followed
        scheduler = following(served.settings, served.kv_cache.tokens) if is_plain else None
        return replace(served, notes=(*served.notes, table), scheduler=scheduler)

    def with_available(self, question: Question, served: Served, free: int) -> Served:
        """The answer where so many bytes were free once the weights were loaded."""
        left = free - next(part.bytes for part in served.parts if part.name == "kept free")
        start = Resolved(self, question)
        return with_pool(served, left - _states(left, start.own.cached.states, start.found))

    def token_bytes(self, start: Resolved) -> int:
        """Layers with a window have a pool of their own, of fewer tokens (``HybridSWAPoolConfigurator``), in models
        that the engine has it for."""
        own, element = start.own.cached, CACHE_BYTES[start.found["kv_cache_dtype"]]
        kind = str(language(start.question.model).config.get("model_type"))
        part = start.found["swa_full_tokens_ratio"] if kind in _WINDOWED else 1
        return round((own.values + part * own.windowed) * element)


def _states(left: int, size: int, found: Mapping[str, Any]) -> int:
    """Bytes of the states that sequences have of linear attention, of so many each: a share of what is left, or as
    many as are asked for; and one more that nobody has (``_handle_max_mamba_cache``)."""
    if not size:
        return 0
    times = found["mamba_full_memory_ratio"]
    slots = found.get("max_mamba_cache_size")
    if slots is None and found.get("disable_radix_cache"):
        slots = found.get("max_running_requests")
    if slots is None:
        slots = max(0, int(left * times / (1 + times) - size) // size)
    return (slots + 1) * size


def _batches(start: Resolved) -> tuple[int, int]:
    """Tokens of a prefill's chunk, and the largest batch of CUDA graphs: as given, else by the card's memory."""
    found, size, few = start.found, _board(start.device), start.cards < 4
    usual = next((one[1:] for one in _BY_MEMORY if size < one[0]), _LARGEST)
    chunk = found.get("chunked_prefill_size", usual[0])
    if chunk < 1:  # prompts are not cut
        chunk = found["max_prefill_tokens"]
    graphs = min(found.get("cuda_graph_max_bs", usual[1 if few else 2]), found.get("max_running_requests", 1 << 31))
    return chunk, 0 if found.get("disable_cuda_graph") else graphs


def beside_weights(model: ServedModel, cards: int) -> int:
    """Bytes of one card that loading takes beside 16-bit weights: what is left of the allocator's segments when every
    layer's products were made in their order, and the rotary table (srt/layers/rotary_embedding). 0 where layers differ
    or are quantised, which is not followed."""
    layers = count(model, "num_hidden_layers")
    products: dict[str, int] = {}
    for matrix in matrices(model):
        times = 1 if matrix.name == "lm_head" else matrix.count
        if (times not in (1, layers) and times % layers) or model.config.get("quantization_config"):
            return 0
        name = _FUSED.get(matrix.name.rpartition(".")[2], matrix.name)
        products[name] = products.get(name, 0) + 2 * matrix.numel // matrix.cut(cards) * max(1, times // layers)
    head = products.pop("lm_head", 0)
    table = 2 * count(model, "vocab_size") * count(model, "hidden_size") // cards
    heads, hidden = count(model, "num_attention_heads"), count(model, "hidden_size")
    positions = count(model, "max_position_embeddings", 2048)
    rotary = 4 * positions * count(model, "head_dim", hidden // heads)
    sizes = [table, *(size for _ in range(layers) for size in products.values()), head, rotary]
    allocator = PyTorchCachingAllocator(None)
    for size in filter(None, sizes):
        allocator.malloc(size)
    return allocator.reserved_bytes - sum(sizes) + rotary


def _board(device: Device) -> float:
    """MiB of the card by ``nvidia-smi`` (``get_nvgpu_memory_capacity``)."""
    return (device.board_bytes or device.capacity_bytes) / MIB


def default_fraction(device: Device, cards: int, chunk: int, graphs: int, prefills_mib: int = 0) -> float:
    """The same file, ``handle_gpu_memory_settings``: kept free are 512 MiB, 1.5 MiB a token of a chunk, 128 MiB a card,
    2 MiB a sequence of the largest graph, what graphs of prefills take, and at least 10 GiB on cards beyond 60."""
    size = _board(device)
    kept = 512 + 1.5 * max(chunk, 2048) + cards / 8 * 1024 + 2 * graphs + prefills_mib
    if size > 60 * 1024:
        kept = max(kept, 10 * 1024)
    return max(0.01, round((size - kept) / size, 3))


#: Sizes of graphs of prefills, tokens: from, to, step (``generate_prefill_cuda_graph_batch_sizes``,
#: ``srt/arg_groups/cuda_graph_hook.py``).
_PREFILLS = (
    (4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, None, 512),
)  # fmt: skip


def _prefill_graphs_mib(model: ServedModel, chunk: int) -> int:
    """``reserve_for_graph_mb``: 8 MiB a size up to a chunk, 1.5 GiB for latent attention."""
    if model.config.get("kv_lora_rank"):
        return 1536
    tops = ((first, min(chunk, chunk if last is None else last), step) for first, last, step in _PREFILLS)
    return 8 * sum(len(range(first, top + 1, step)) for first, top, step in tops)


ENGINE: Any = SGLang()
