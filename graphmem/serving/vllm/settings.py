"""The engine's options with its own defaults, by card, entry point and version, and its own refusals.

Followed from vllm 0.32.0, ``engine/arg_utils.py`` and ``config/{model,vllm,cache,parallel,scheduler}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphmem.base.versions import Version
from graphmem.errors import UsageError
from graphmem.serving.base import ENTRIES, Question, ServedModel
from graphmem.serving.values import LONG_ROPE, YARN, count, counted, number, rope_of
from graphmem.serving.vllm import arguments, versions
from graphmem.serving.vllm.arguments import Arguments
from graphmem.serving.vllm.kv_cache import CACHE_DTYPES
from graphmem.serving.vllm.run import Batch
from graphmem.units import GIB

#: ``CacheConfig.DEFAULT_BLOCK_SIZE`` (config/cache.py).
BLOCK_SIZE = 16
#: Block sizes that FlashAttention takes (v1/attention/backends/flash_attn.py: multiples of 16).
_BLOCK_STEP = 16
#: ``--dtype``: bytes of an element; auto is the configuration's, fp32 made fp16 (``_resolve_auto_dtype``).
DTYPES = {"auto": 0, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
#: ``model_type`` with layers of states, whose kernels Triton times once on a machine, compiled or not.
STATES = ("mamba2", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "zamba2")
#: Speculative methods of the first model runner alone, which do not schedule ahead (config/vllm.py).
_FIRST_RUNNER_ONLY = ("medusa",)
#: ``model_type`` of the engine's encoders of text, which read in both directions: whole texts, and nothing is kept.
ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
#: Decoders that read in both directions where their configuration says so (``attn_type``, config/model.py, and their
#: files in model_executor/models).
_BOTH_WAYS = ("gemma3_text", "llama", "qwen2", "qwen3")
#: Ends of the names of classes that generate, and of those that pool.
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_POOLING = ("ForTextEncoding", "ForSequenceClassification", "ForTokenClassification", "ForRewardModeling", "Model")
#: Keys that say how many experts there are, and kinds with layers of states.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WITH_STATES = (*STATES, "lfm2", "lfm2_moe", "mamba", "falcon_mamba", "jamba", "qwen3_next", "qwen3_5_text")
#: What tensor parallel ranks share out where there are no heads of attention.
_SHARED_OUT = {"mamba2": "num_heads", "mamba": "hidden_size", "falcon_mamba": "hidden_size"}
#: The first engine prefills longer contexts in chunks alone (engine/arg_utils.py of 0.6 and 0.7).
_IN_ONE_BATCH = 32 * 1024
#: Keys that name the longest context, in the order of transformers_utils/model_arch_config_convertor.py.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
#: Fields of :class:`Arguments` -> what an answer calls them, where they are not as usual.
_SHOWN = {
    "pipeline": "pipeline_parallel_size", "data": "data_parallel_size", "expert_parallel": "enable_expert_parallel",
    "redundant_experts": "num_redundant_experts", "graph_mode": "cudagraph_mode",
    "cache_bytes": "kv_cache_memory_bytes", "blocks": "num_gpu_blocks_override",
    "prefix_caching": "enable_prefix_caching", "chunked_prefill": "enable_chunked_prefill",
    "offloaded_bytes": "cpu_offload_bytes", "context_parallel": "decode_context_parallel_size",
    "performance": "performance_mode", "pools": "pooling",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """All options, resolved."""

    version: Version
    batch: Batch
    utilization: float
    tensor_parallel: int
    cache_dtype: str
    itemsize: int
    dtype: str
    eager: bool
    cold: bool
    runner: str
    capture_sizes: tuple[int, ...]
    batches_in_flight: int
    longest: int
    more: Arguments = field(default_factory=Arguments)

    @property
    def cards(self) -> int:
        """Cards of the whole group: tensor, pipeline and data parallel ranks."""
        return self.tensor_parallel * self.more.pipeline * self.more.data

    def shown(self, quantization: str | None) -> dict[str, Any]:
        """By the engine's own names."""
        return {
            "tensor_parallel_size": self.tensor_parallel,
            "max_model_len": self.batch.length,
            "max_num_seqs": self.batch.requests,
            "max_num_batched_tokens": self.batch.tokens,
            "gpu_memory_utilization": self.utilization,
            "kv_cache_dtype": self.cache_dtype,
            "dtype": self.dtype,
            "quantization": quantization,
            "block_size": self.batch.block_size,
            "enforce_eager": self.eager,
            "cold": self.cold,
            "cudagraph_capture_sizes": list(self.capture_sizes),
            "model_runner": self.runner,
            **self._shown_further(),
        }

    def _shown_further(self) -> dict[str, object]:
        """Options that are not as usual."""
        more, usual = self.more, Arguments()
        given = {name: getattr(more, one) for one, name in _SHOWN.items() if getattr(more, one) != getattr(usual, one)}
        if more.adapters:
            given |= {"max_loras": more.adapters.slots, "max_lora_rank": more.adapters.rank}
        if more.speculation:
            given |= {"speculative_method": more.speculation.method, "num_speculative_tokens": more.speculation.tokens}
        return given


def resolve(question: Question) -> Settings:
    """The options with their defaults. Raises :class:`UsageError` with the engine's reason and a remedy."""
    version = versions.checked(question.version)
    config = question.model.config
    more = _pooling(question, arguments.read(question.arguments))
    batch, longest = _batch(question, version, more)
    utilization = _utilization(question, version)
    if question.kv_cache_dtype not in CACHE_DTYPES:
        raise UsageError(f"kv_cache_dtype {question.kv_cache_dtype!r}; accepted: {', '.join(CACHE_DTYPES)}")
    dtype, itemsize = _dtype(question, config)
    check_parallel(question.model, question.tensor_parallel_size)
    _check_context_parallel(question.model, question.tensor_parallel_size, more.context_parallel)
    runner = _runner(more, version, question)
    _check_followed(more, runner)
    eager = question.enforce_eager or (not more.compiled and more.graph_mode == "NONE")
    return Settings(
        version=version, batch=batch, utilization=utilization, tensor_parallel=question.tensor_parallel_size,
        cache_dtype=question.kv_cache_dtype, itemsize=itemsize, dtype=dtype, eager=eager,
        cold=question.cold and (not eager or config.get("model_type") in STATES), runner=runner,
        capture_sizes=() if eager or more.graph_mode == "NONE" else _capture_sizes(question, batch, more),
        batches_in_flight=_batches_in_flight(more, version, runner), longest=longest, more=more,
    )  # fmt: skip


def _batch(question: Question, version: Version, more: Arguments) -> tuple[Batch, int]:
    """(the most of a step, the longest request that the model has)."""
    length, longest = _length(question.model, question.max_model_len, version)
    tokens, requests = _batch_defaults(question, version, more)
    if more.performance == "throughput":  # both defaults are doubled (engine/arg_utils.py)
        tokens, requests = 2 * tokens, 2 * requests
    requests = _positive("max_num_seqs", question.max_num_seqs) or requests
    if question.max_num_batched_tokens is None:
        second = _has_second_engine(question, version, more)
        chunked = more.chunked_prefill and (second or length > _IN_ONE_BATCH)
        tokens = min(requests * length, tokens if chunked else max(length, tokens))
    else:
        tokens = _positive("max_num_batched_tokens", question.max_num_batched_tokens)
        if question.max_num_seqs is None:
            requests = min(requests, tokens)
        _check_tokens(tokens, requests, length, more)
    block_size = question.block_size or BLOCK_SIZE
    if block_size < 1 or block_size % _BLOCK_STEP:
        raise UsageError(f"block_size is {block_size}; FlashAttention takes multiples of {_BLOCK_STEP}")
    return Batch(tokens, requests, length, block_size), longest


def _check_tokens(tokens: int, requests: int, length: int, more: Arguments) -> None:
    """``SchedulerConfig.verify_max_model_len`` (config/scheduler.py)."""
    if tokens < requests:
        raise UsageError(
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({requests}): give "
            f"--max-num-seqs {tokens} or less, or --max-num-batched-tokens {requests} or more"
        )
    if tokens < length and not more.chunked_prefill:
        raise UsageError(
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}), and without chunked "
            f"prefill a prompt goes into one batch: give --max-model-len {tokens} or less, "
            f"--max-num-batched-tokens {length} or more, or leave out --no-enable-chunked-prefill"
        )


def _utilization(question: Question, version: Version) -> float:
    asked = question.gpu_memory_utilization
    utilization = (0.92 if versions.UTILIZATION_92.holds(version) else 0.9) if asked is None else asked
    if not 0 < utilization <= 1:
        raise UsageError(f"gpu_memory_utilization is {utilization}; accepted: above 0, to 1")
    return utilization


def _pooling(question: Question, more: Arguments) -> Arguments:
    """A model whose class says that it pools does, where nothing else is asked (``_SUFFIX_TO_DEFAULTS``,
    config/model.py)."""
    config = question.model.config
    kind = config.get("model_type")
    given = {name.replace("-", "_") for name, _ in question.arguments}
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    pools = name.endswith(_POOLING) and not name.endswith(_GENERATING) and not given & {"runner", "task", "convert"}
    both = kind in _BOTH_WAYS and (config.get("is_causal") is False or bool(config.get("use_bidirectional_attention")))
    if kind in ENCODERS or (both and (pools or more.pools)):
        return replace(more, pools=True, encodes=True, chunked_prefill=False, prefix_caching=False)
    return replace(more, pools=pools or more.pools)


def _check_followed(more: Arguments, runner: str) -> None:
    """Refuse the settings that are read and not followed yet."""
    if more.speculation is None:
        return
    first_only = more.speculation.method in _FIRST_RUNNER_ONLY
    asked = {
        "speculative_config with model_runner v1": runner == "V1" and not first_only,
        "speculative method medusa with model_runner v2": runner == "V2" and first_only,
        "speculative_config with a pipeline": more.pipeline > 1,
    }
    for name, given in asked.items():
        if given:
            raise UsageError(f"vLLM's {name} is not followed yet: leave it out")


def _runner(more: Arguments, version: Version, question: Question) -> str:
    config = question.model.config
    second = versions.has_second_runner(
        version,
        str(config.get("model_type")),
        experts=any(config.get(name) for name in _EXPERTS),
        states=str(config.get("model_type")) in _WITH_STATES,
        quantized=bool(question.quantization or config.get("quantization_config")),
    )
    usual = "v2" if second else "v1"
    if more.speculation and more.speculation.method in _FIRST_RUNNER_ONLY:
        usual = "v1"
    if more.pools and version < versions.NEWEST:  # recorded of the newest only
        usual = "v1"
    runner = (more.model_runner or usual).upper()
    if runner == "V2" and version < versions.FIRST_WITH_SECOND_RUNNER:
        raise UsageError("model_runner is v2; accepted: v1, and since 0.22 v2")
    return runner


def _batches_in_flight(more: Arguments, version: Version, runner: str) -> int:
    """``max_concurrent_batches`` (config/vllm.py): one a stage of the pipeline, and one more where scheduling is
    asynchronous, which the first model runner does not do with a pipeline."""
    if more.speculation and more.speculation.method in _FIRST_RUNNER_ONLY:
        return more.pipeline
    asynchronous = versions.ASYNC_SCHEDULING.holds(version) if more.async_scheduling is None else more.async_scheduling
    if asynchronous and (runner == "V2" or more.pipeline == 1):
        return more.pipeline + 1
    return more.pipeline


def _has_second_engine(question: Question, version: Version, more: Arguments) -> bool:
    return more.second_engine and versions.has_second_engine(version, question.device.capability)


def _positive(name: str, value: int | None) -> int:
    if value is not None and value < 1:
        raise UsageError(f"{name} is {value}; accepted: 1 and more")
    return value or 0


def _length(model: ServedModel, asked: int | None, version: Version) -> tuple[int, int]:
    """(length of a request, the longest that the model has) as ``_get_and_verify_max_len`` finds them."""
    found = [count(model, key) for key in _LENGTH_KEYS if model.config.get(key) is not None]
    longest = min(found) if found else 2048
    scaling = rope_of(model)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    # Gemma 3 states the length that it has after stretching; so do, for newer versions, models with YaRN.
    stated = "gemma3" in str(model.config.get("model_type")) or (
        kind in YARN and versions.YARN_STATES_LENGTH.holds(version)
    )
    original = "original_max_position_embeddings"
    if kind not in ("default", *LONG_ROPE, "llama3", "mrope") and "factor" in scaling and not stated:
        if kind == "yarn":
            longest = counted(model, original, scaling.get(original), longest)
        longest = int(longest * number(model, "factor of rope_scaling", scaling["factor"], 1.0))
    if asked is None and kind in LONG_ROPE and versions.SHORT_BY_DEFAULT.holds(version):
        longest = count(model, original, longest)
    if asked is None:
        return longest, longest
    if not found and asked >= 1:  # the configuration names no limit, so what is asked for is
        return asked, asked
    if asked < 1:
        raise UsageError(f"max_model_len is {asked}; accepted: 1 to {longest}")
    if asked > longest:
        raise UsageError(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len ({longest}) of the "
            f"model's config.json; give --max-model-len {longest} or less, or extend the model's rope_scaling"
        )
    return asked, longest


def _batch_defaults(question: Question, version: Version, more: Arguments) -> tuple[int, int]:
    """(tokens, requests): ``get_batch_defaults``; the first engine's are the same on every card, and a card that shares
    the host's memory is taken for one of none, since NVML does not say how much it has."""
    if question.entry not in ENTRIES:
        raise UsageError(f"entry is {question.entry!r}; accepted: {', '.join(ENTRIES)}")
    if not _has_second_engine(question, version, more):
        return 2048, 256
    server = question.entry == "server"
    memory = 0 if question.device.unified_memory else question.device.capacity_bytes
    if versions.LARGEST_CARDS.holds(version) and memory >= 160 * GIB:
        return 16384, 1024
    if memory >= 70 * GIB and "a100" not in question.device.name.lower():
        return (8192 if server else 16384), 1024
    return (2048 if server else 8192), 256


def _dtype(question: Question, config: Mapping[str, Any]) -> tuple[str, int]:
    if question.dtype not in DTYPES:
        raise UsageError(f"dtype {question.dtype!r}; accepted: {', '.join(DTYPES)}")
    name = question.dtype
    if name == "auto":
        name = str(config.get("torch_dtype") or config.get("dtype") or "float16").removeprefix("torch.")
        name = name if name in ("float16", "bfloat16") else "float16"
    if name == "bfloat16" and not question.device.limits.bfloat16:
        raise UsageError(
            f"Bfloat16 is only supported on GPUs with compute capability of at least 8.0; {question.device.name} has "
            f"{'.'.join(map(str, question.device.capability))}: give --dtype half"
        )
    return name, DTYPES.get(name, 2)


def check_parallel(model: ServedModel, tp: int) -> None:
    """``verify_with_parallel_config``. Raises :class:`UsageError` with the sizes that do."""
    heads = count(model, _SHARED_OUT.get(str(model.config.get("model_type")), "num_attention_heads"))
    kv_heads = count(model, "num_key_value_heads", heads)
    if tp < 1:
        raise UsageError(f"tensor_parallel_size is {tp}; accepted: 1 and more")
    good = [size for size in range(1, heads + 1) if _divides(heads, kv_heads, size)]
    if not _divides(heads, kv_heads, tp):
        raise UsageError(
            f"Total number of attention heads ({heads}, {kv_heads} of keys) must be divisible by tensor parallel size "
            f"({tp}); accepted here: {', '.join(map(str, good))}"
        )


def _check_context_parallel(model: ServedModel, tp: int, ranks: int) -> None:
    """``verify_with_parallel_config``: ranks that would hold the same keys share out the context."""
    if ranks == 1:
        return
    kv_heads = 1 if model.config.get("kv_lora_rank") else count(model, "num_key_value_heads", 1)
    most = tp // kv_heads
    if tp % ranks or ranks > most:
        good = [size for size in range(1, max(1, most) + 1) if tp % size == 0]
        raise UsageError(
            f"decode_context_parallel_size is {ranks}; accepted with {tp} cards and {kv_heads} heads of keys: "
            f"{', '.join(map(str, good))}"
        )


def _divides(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 if kv_heads >= tp else tp % kv_heads == 0)


def _capture_sizes(question: Question, batch: Batch, more: Arguments) -> tuple[int, ...]:
    """``_set_cudagraph_sizes``: 1, 2, 4, then steps of 8 up to 256 and of 16 beyond, up to twice the requests, each of
    which decodes as many tokens as are drafted and one more; and the sizes of batches that only decode. Sizes that are
    given are taken as they are, up to the tokens of a batch."""
    if more.capture_sizes is not None:
        most = min(batch.tokens, more.largest_graph or batch.tokens)
        sizes = tuple(size for size in more.capture_sizes if size <= most)
        if not sizes:
            raise UsageError(f"cudagraph_capture_sizes are all above {most}; give one of 1 to {most}")
        return sizes
    largest = question.device.limits.vllm_largest_graph
    drafted = 1 + (more.speculation.tokens if more.speculation else 0)
    most = min(more.largest_graph or min(batch.requests * drafted * 2, largest), batch.tokens)
    small = range(1, min(most, 32) + 1) if more.performance == "interactivity" else (1, 2, 4)
    found = {*small, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)}
    if batch.tokens <= most:
        found.add(batch.tokens)
    return tuple(sorted(size for size in found if size <= most))
