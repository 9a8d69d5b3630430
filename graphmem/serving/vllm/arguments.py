"""The engine's further options, by its own names, as text: the effect of each on memory, or that it has none.

Followed from vllm 0.32.0, ``engine/arg_utils.py`` and ``config``. An option not listed here is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import spelled
from graphmem.serving.installed import BASES
from graphmem.serving.options import TABLES, flag, one_of, values_of, whole, without_effect
from graphmem.serving.vllm.lora import Adapters
from graphmem.units import GIB, parse_bytes

T = TypeVar("T")

#: ``All2AllBackend`` (config/parallel.py): the first is the default, and what the next two became; the others are
#: libraries of their own.
GATHERED = ("allgather_reducescatter", "naive", "pplx")
_EXCHANGES = (
    *GATHERED, "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "mori_high_throughput", "mori_low_latency",
    "moonep", "nixl_ep", "flashinfer_all2allv", "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided",
    "passthrough",
)  # fmt: skip
#: ``MaxLoRARanks`` (config/lora.py).
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: ``CUDAGraphMode`` (config/compilation.py) that can be asked for.
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
#: ``cudagraph_mode`` by ``--optimization-level`` (config/vllm.py), which is 2 as a rule; 0 does not compile.
_LEVELS, _USUAL_LEVEL = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"), 2
#: ``CompilationMode``: all but the last leave the model to Python, or to torch.compile as it comes.
_COMPILED = 3
#: Options that change nothing here.
_WITHOUT_EFFECT = without_effect("vllm")


#: Options that are taken, and whose memory on the card is not followed: what the answer says of each.
_NOT_COUNTED: dict[str, str] = TABLES["not_counted"]
#: ``--task``, ``--runner`` and ``--convert`` that generate, and those that return states of the model.
_GENERATES = ("auto", "generate", "none")
_POOLS = ("pooling", "embed", "embedding", "classify", "score", "reward")
#: ``PerformanceMode`` (config/vllm.py).
PERFORMANCE_MODES = ("balanced", "interactivity", "throughput")


@dataclass(frozen=True)
class Speculation:
    """``speculative_config``: its method, tokens that are drafted, and where the draft model's configuration is."""

    method: str
    tokens: int
    model: str | None


# --- how options are read ---------------------------------------------------------------------------------------------


def _size(name: str, text: str) -> int:
    return parse_bytes(text)


def _gigabytes(name: str, text: str, least: float = 1e-9) -> int:
    """A number of GiB, as the engine takes it."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= 1 << 20:
        raise UsageError(
            f"{spelled(name)} {shown(text)}; accepted: a number of GiB {'above' if least else 'from'} 0, "
            "without the unit"
        )
    return int(value * GIB)


def _mapping(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{spelled(name)} {shown(text)}; accepted: a JSON object")
    return value


def _sizes(name: str, text: str) -> list[int]:
    try:
        value = (
            json.loads(text) if text.lstrip().startswith("[") else [int(one) for one in text.replace(",", " ").split()]
        )
    except (ValueError, RecursionError):
        value = None
    return _checked_sizes(name, value)


def _checked_sizes(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and 1 <= one <= 1 << 16 for one in value):
        raise UsageError(f"{spelled(name)} {shown(value)}; accepted: whole numbers from 1 to {1 << 16}")
    return value


def _compilation(name: str, text: str) -> dict[str, Any]:
    """``compilation_config``: as JSON, or the mode alone."""
    text = text.strip()
    value: dict[str, Any] = {"mode": int(text)} if text.isdigit() else _mapping(name, text)
    if "level" in value:
        value["mode"] = value.pop("level")
    if "mode" in value and value["mode"] not in (0, 1, 2, _COMPILED):
        raise UsageError(f"mode of compilation_config is {shown(value['mode'])}; accepted: 0 to {_COMPILED}")
    if "cudagraph_mode" in value:
        value["cudagraph_mode"] = one_of(*GRAPH_MODES)("cudagraph_mode", str(value["cudagraph_mode"]).upper())
    if value.get("cudagraph_capture_sizes") is not None:
        value["cudagraph_capture_sizes"] = _checked_sizes("cudagraph_capture_sizes", value["cudagraph_capture_sizes"])
    if value.get("max_cudagraph_capture_size") is not None:
        value["max_cudagraph_capture_size"] = whole()(
            "max_cudagraph_capture_size", str(value["max_cudagraph_capture_size"])
        )
    return value


#: ``SpeculativeMethod``s that are followed, and those that need a model of their own.
_METHODS, _OWN_MODEL = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa"), (
    "draft_model", "eagle", "eagle3", "medusa"
)  # fmt: skip
#: Other names of prediction by the model's own layers (``MTPModelTypes``).
_PREDICTING = ("deepseek_mtp", "qwen3_next_mtp", "qwen3_5_mtp")


def _speculative(name: str, text: str) -> Speculation:
    value = _mapping(name, text)
    model, method = value.get("model"), value.get("method")
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    if method in _PREDICTING:
        method = "mtp"
    if method not in _METHODS:
        raise UsageError(f"speculative method {shown(method)} is not followed; accepted: {', '.join(_METHODS)}")
    if method in _OWN_MODEL and not isinstance(model, str):
        raise UsageError(f'speculative_config of method {method} needs a "model": the draft\'s config.json or folder')
    tokens = value.get("num_speculative_tokens")
    if type(tokens) is not int or not 1 <= tokens <= 1 << 10:
        raise UsageError(f"num_speculative_tokens is {shown(tokens)}; accepted: a whole number from 1 to {1 << 10}")
    return Speculation(method, tokens, model if method in _OWN_MODEL else None)


def _redundant(name: str, text: str) -> int:
    count = _mapping(name, text).get("num_redundant_experts", 0)
    if type(count) is not int or not 0 <= count <= 1 << 12:
        raise UsageError(f"num_redundant_experts is {shown(count)}; accepted: a whole number from 0 to {1 << 12}")
    return count


def _json(name: str, text: str) -> str:
    return json.dumps(_mapping(name, text))


def _limits(name: str, text: str) -> str:
    """Items of each modality: as JSON, or as ``image=4,video=1``, which releases before 0.10 had."""
    pairs = re.findall(r"([a-z]+)=(\d{1,9})", text)
    if pairs and ",".join(map("=".join, pairs)) == text.replace(" ", ""):
        return json.dumps({key: int(value) for key, value in pairs})
    return _json(name, text)


def _is_data_parallel(name: str, text: str) -> bool:
    return bool(one_of("weights", "data")(name, text) == "data")


def _pools(name: str, text: str) -> bool:
    """Whether a model is asked to pool."""
    return one_of(*_GENERATES, *_POOLS)(name, text) in _POOLS


def _state_bytes(name: str, text: str) -> int | None:
    return _STATE_BYTES[one_of(*_STATE_BYTES)(name, text)]


#: ``MambaDType``: bytes of an element of a state, None for the model's.
_STATE_BYTES = {"auto": None, "float32": 4, "float16": 2, "bfloat16": 2}
#: Short spellings of the engine's.
_SHORT = {
    "pp": "pipeline_parallel_size", "dp": "data_parallel_size", "ep": "enable_expert_parallel",
    "sc": "speculative_config", "cc": "compilation_config", "O": "optimization_level",
    "dcp": "decode_context_parallel_size", "tp": "tensor_parallel_size", "kv_cache_memory": "kv_cache_memory_bytes",
    "ac": "attention_config", "cuda_graph_sizes": "cudagraph_capture_sizes",
}  # fmt: skip


# --- the options ------------------------------------------------------------------------------------------------------


def _asked(name: str, reader: Callable[[str, str], T], default: T) -> T:
    """A field whose value is that of the option ``name``, as ``reader`` reads it."""
    return field(default=default, metadata={"name": name, "reader": reader})


@dataclass(frozen=True)
class Arguments:
    """The further options, read. Sizes are bytes; None where the engine decides. ``items_per_prompt`` and ``processor``
    are ``limit_mm_per_prompt`` and ``mm_processor_kwargs``, as JSON."""

    basis: str = _asked("basis", one_of(*BASES), BASES[0])
    model_runner: str | None = _asked("model_runner", one_of("v1", "v2"), None)
    model_impl: str = _asked("model_impl", one_of("auto", "vllm", "transformers"), "auto")
    outside: int | None = _asked("outside", _size, None)
    pipeline: int = _asked("pipeline_parallel_size", whole(1, 64), 1)
    data: int = _asked("data_parallel_size", whole(1, 1024), 1)
    expert_parallel: bool = _asked("enable_expert_parallel", flag, False)
    redundant_experts: int = 0
    balanced: bool = _asked("enable_eplb", flag, False)
    exchange: str = _asked("all2all_backend", one_of(*_EXCHANGES), GATHERED[0])
    adapters: Adapters | None = None
    speculation: Speculation | None = _asked("speculative_config", _speculative, None)
    graph_mode: str = "FULL_AND_PIECEWISE"
    compiled: bool = True
    capture_sizes: tuple[int, ...] | None = None
    largest_graph: int | None = None
    cache_bytes: int | None = _asked("kv_cache_memory_bytes", _size, None)
    blocks: int | None = _asked("num_gpu_blocks_override", whole(), None)
    host_cache_bytes: int = _asked("kv_offloading_size", _gigabytes, 0)
    async_scheduling: bool | None = _asked("async_scheduling", flag, None)
    prefix_caching: bool = _asked("enable_prefix_caching", flag, True)
    chunked_prefill: bool = _asked("enable_chunked_prefill", flag, True)
    dummy_weights: bool = _asked("load_format", lambda _, text: text == "dummy", False)
    text_only: bool = _asked("language_model_only", flag, False)
    items_per_prompt: str = _asked("limit_mm_per_prompt", _limits, "{}")
    processor: str = _asked("mm_processor_kwargs", _json, "{}")
    skip_mm_profiling: bool = _asked("skip_mm_profiling", flag, False)
    encoder_data_parallel: bool = _asked("mm_encoder_tp_mode", _is_data_parallel, False)
    conv_state_bytes: int | None = _asked("mamba_cache_dtype", _state_bytes, None)
    scan_state_bytes: int | None = _asked("mamba_ssm_cache_dtype", _state_bytes, None)
    overrides: str = _asked("hf_overrides", _json, "{}")
    offloaded_bytes: int = _asked("cpu_offload_gb", lambda name, text: _gigabytes(name, text, least=0), 0)
    context_parallel: int = _asked("decode_context_parallel_size", whole(1, 1024), 1)
    performance: str = _asked("performance_mode", one_of(*PERFORMANCE_MODES), "balanced")
    pools: bool = _asked("runner", _pools, False)
    #: No option: whether a model that pools reads in both directions, and keeps nothing.
    encodes: bool = False
    #: Of versions that had both: whether the second engine runs (``VLLM_USE_V1``), and whether FlashInfer samples, as
    #: it did up to 0.11.0 where it was installed, as in the published images (``VLLM_USE_FLASHINFER_SAMPLER``).
    second_engine: bool = _asked("use_v1", flag, True)
    flashinfer_samples: bool = _asked("use_flashinfer_sampler", flag, False)
    not_counted: tuple[str, ...] = ()


#: How an option is read, by the engine's name for it: those of fields, and those that several fields are made of.
_FIELDS = {one.metadata["name"]: one for one in fields(Arguments) if one.metadata}
_READERS: dict[str, Callable[[str, str], Any]] = {name: one.metadata["reader"] for name, one in _FIELDS.items()} | {
    "eplb_config": _redundant,
    "enable_lora": flag,
    "max_loras": whole(1, 1024),
    "max_lora_rank": whole(1, 512),
    "compilation_config": _compilation,
    "optimization_level": whole(0, 3),
    "cudagraph_capture_sizes": _sizes,
    "max_cudagraph_capture_size": whole(),
}


def read(given: tuple[tuple[str, str], ...]) -> Arguments:
    """The options. Raises :class:`UsageError` for one that is not followed, and for a value that is not accepted."""
    pairs = [(name, *_full(name.replace("-", "_"), text)) for name, text in given]
    found = values_of("vLLM", pairs, _READERS, {*_NOT_COUNTED, *_WITHOUT_EFFECT})
    noted = (_NOT_COUNTED[name] for _, name, _ in pairs if name in _NOT_COUNTED)
    return replace(_resolved(found), not_counted=tuple(dict.fromkeys(noted)))


def _full(name: str, text: str) -> tuple[str, str]:
    """An option by its full name, with the text that says the same there."""
    if name[:1] == "O" and name[1:].isdigit():
        name, text = "O", name[1:]
    name = _SHORT.get(name, name)
    if name.startswith("no_") and name[3:] in _READERS:
        return name[3:], "false"
    if name == "rope_scaling":  # before 0.12; ``--hf-overrides`` since
        return "hf_overrides", json.dumps({name: _mapping(name, text)})
    if name in ("task", "convert") and _pools(name, text):
        return "runner", text
    return name, text


def _resolved(values: Mapping[str, Any]) -> Arguments:
    """The engine's arguments with its defaults, as it resolves them. Raises :class:`UsageError` for graphs of a model
    that is not compiled."""
    compilation: Mapping[str, Any] = values.get("compilation_config", {})
    level = values.get("optimization_level", _USUAL_LEVEL)
    mode = compilation.get("cudagraph_mode", _LEVELS[level])
    compiled = compilation.get("mode", _COMPILED if level else 0) == _COMPILED
    if not compiled:  # pieces are what is compiled (``CUDAGraphMode.without_piecewise``)
        mode = {"PIECEWISE": "NONE", "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY"}.get(mode, mode)
    if not compiled and mode != "NONE":
        raise UsageError(
            "CUDA graphs of a model that is not compiled are not followed: give --enforce-eager, or "
            '--compilation-config \'{"cudagraph_mode": "NONE"}\' with it'
        )
    sizes = values.get("cudagraph_capture_sizes", compilation.get("cudagraph_capture_sizes"))
    given = {one.name: values[name] for name, one in _FIELDS.items() if name in values}
    return Arguments(
        **{"scan_state_bytes": given.get("conv_state_bytes"), **given},
        redundant_experts=values.get("eplb_config", 0) if given.get("balanced") else 0,
        adapters=_adapters(values),
        graph_mode=mode,
        compiled=compiled,
        capture_sizes=None if sizes is None else tuple(sorted(set(sizes))),
        largest_graph=values.get("max_cudagraph_capture_size", compilation.get("max_cudagraph_capture_size")),
    )


def _adapters(values: Mapping[str, Any]) -> Adapters | None:
    if not values.get("enable_lora"):
        given = sorted({"max_loras", "max_lora_rank"} & set(values))
        if given:
            raise UsageError(f"{spelled(given[0])} has no effect without --enable-lora: give that too")
        return None
    rank = values.get("max_lora_rank", 16)
    if rank not in RANKS:
        raise UsageError(f"--max-lora-rank {rank}; accepted: {', '.join(map(str, RANKS))}")
    return Adapters(values.get("max_loras", 1), rank)
