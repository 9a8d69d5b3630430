"""The register of differences between versions of vLLM.

Read: the released wheels of 0.6.6, 0.7.3, 0.8.5, 0.9.2, 0.10.2, 0.11.0 and 0.11.2, 0.13 to 0.28 but for 0.23, and 0.30
to 0.33. Where a change lies between two of them it is taken to come with the later one. 0.32 is held by
recordings; the others by their source, and by figures of public logs.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.base.versions import Version
from graphmem.devices.capabilities import reaches
from graphmem.errors import UsageError

#: The version that is taken where none is said, and the last one that is followed.
NEWEST: Version = (0, 32)
LAST: Version = (0, 33)
OLDEST: Version = (0, 6)


@dataclass(frozen=True)
class Change:
    """Something that a version brought."""

    since: Version
    what: str

    def holds(self, version: Version) -> bool:
        """True if that version has it."""
        return version >= self.since


#: v1: the second engine, which compiles, prefills in chunks as a rule, and takes batches by card.
SECOND_ENGINE = Change((0, 8), "the second engine, V1")
#: v1/worker/gpu_worker.py: in 0.8 all that was in use on the card and not PyTorch's, context and others included.
GROWTH_ALONE = Change((0, 9), "of what is outside PyTorch only what came since the engine began is charged")
#: distributed/parallel_state.py, ``_EP``; public logs of two and of eight Hopper cards under 0.10 hold it.
GROUP_OF_EXPERTS = Change((0, 9), "ranks that share experts have a group of their own, whether there are any or not")
#: v1/worker/gpu_worker.py, ``init_device``: the groups of processes are made before free memory is first looked at.
GROUPS_BEFORE = Change((0, 11), "NCCL's communicators are there before the engine looks, and not charged")
#: model_loader/bitsandbytes_loader.py, ``_dequantize_dq``.
SCALES_UNPACKED = Change((0, 10), "bitsandbytes' scales, themselves quantised, are unpacked when they are loaded")
#: config/model.py, ``_get_and_verify_max_len`` (vllm#27431, vllm#56446).
SHORT_BY_DEFAULT = Change((0, 13), "LongRoPE's models are served at the length of their short texts by default")
YARN_STATES_LENGTH = Change((0, 32), "a model with YaRN states the length that it has after stretching")
#: v1/worker/gpu_model_runner.py, ``profile_run``; models/qwen3_vl.py, ``get_max_video_tokens``.
EMBEDDINGS_SPREAD = Change((0, 11), "embeddings lie among their item's other tokens; Qwen3-VL's videos have 11.5 each")
EMBEDDINGS_ALONE = Change((0, 13), "embeddings are kept without their item's other tokens")
#: config/vllm.py: whether two batches are in flight (config/scheduler.py, ``async_scheduling``).
ASYNC_SCHEDULING = Change((0, 14), "scheduling is asynchronous: two batches are in flight")
#: fused_moe/unquantized_fused_moe_method.py: a modular kernel, whose scratch is the engine's (v1/worker/workspace.py).
SCRATCH_KEPT = Change((0, 15), "the scratch of experts stays")
#: layers/quantization/awq_marlin.py, ``get_min_capability``: 8.0 before.
MARLIN_ON_TURING = Change((0, 15), "AWQ is multiplied by Marlin from compute capability 7.5 on")
#: v1/sample/ops/topk_topp_sampler.py, ``apply_top_k_top_p``: all logits were sorted.
SAMPLES_UNSORTED = Change((0, 17), "top-k and top-p by a Triton kernel instead of a sort of all logits")
#: config/cache.py: the default of ``gpu_memory_utilization`` was 0.9.
UTILIZATION_92 = Change((0, 20), "gpu_memory_utilization is 0.92 by default")
#: envs.py, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS.
GRAPHS_CHARGED = Change((0, 20), "an estimate of CUDA graphs is taken from the KV cache")
#: v1/core/kv_cache_utils.py, ``_report_kv_cache_config``: before, the blocks of one group of layers.
TOKENS_OF_REQUESTS = Change((0, 21), "the tokens that are printed are those of the longest requests at once")
#: v1/worker/gpu_worker.py, ``_scoped_allocator_max_split`` around ``load_model``.
SPLIT_WHILE_LOADING = Change((0, 21), "weights are loaded under max_split_size_mb:20")
#: layers/quantization/awq_marlin.py, ``choose_mp_linear_kernel``: of the wheels 0.18 has it not, and 0.20 has it.
AWQ_BY_MACHETE = Change((0, 20), "AWQ is multiplied by Machete on Hopper, as GPTQ was before")
#: kernels/linear/__init__.py, ``_POSSIBLE_FP8_BLOCK_KERNELS``: of the wheels 0.18 has it not, and 0.20 has it.
BLOCKS_BY_MARLIN = Change((0, 20), "FP8 by blocks is multiplied by Marlin where CUTLASS has no kernels of it")
#: layers/quantization/auto_awq.py: ``--quantization awq`` was AWQ's own kernels before.
ONE_AWQ = Change((0, 24), "AWQ is multiplied by Marlin whatever it is called")
#: utils/mem_utils.py (vllm#49208): free memory before and after instead of weights, peak and growth outside torch.
DEVICE_LEVEL = Change((0, 27), "what is consumed is measured on the card")
#: models/qwen2_vl.py, ``supports_mm_device_do_normalize``; Qwen3-VL's have it with 0.32.
PIXELS_ON_CARD, NEW_PIXELS_ON_CARD = (
    Change(since, "pixels are normalised on the card") for since in ((0, 28), (0, 32))
)
#: engine/arg_utils.py, ``get_batch_defaults``: cards from 160 GiB on.
LARGEST_CARDS = Change((0, 28), "cards of 160 GiB serve batches of 16384 tokens")
#: The same as :data:`SPLIT_WHILE_LOADING` around the profile run.
SPLIT_WHILE_PROFILING = Change((0, 31), "the profile run is under max_split_size_mb:20")
#: config/speculative.py, ``_maybe_override_draft_max_position_embeddings`` (vllm#48894).
DRAFTS_AS_LONG = Change((0, 32), "rotary tables of EAGLE's drafts reach to the target's longest request")
#: layers/rotary_embedding/mrope.py, ``mrope_positions_factor``: four times the positions for every model before.
MROPE_BY_MODEL = Change((0, 32), "only Qwen2-VL's rotary tables are longer than the model's positions")
#: config/vllm.py, ``use_v2_model_runner``: for whatever it can do; before, by :func:`has_second_runner`.
SECOND_RUNNER = Change((0, 32), "the second model runner is the default")
#: v1/worker/gpu_worker.py, ``init_device``: a product of 16 by 16 before free memory is first looked at.
CUBLAS_BEFORE = Change((0, 33), "cuBLAS's workspace is there before the engine looks, and not charged")
#: v1/worker/gpu/model_runner.py, ``_dummy_sampler_run``.
SAMPLES_TWICE = Change((0, 33), "the profile run samples a second time, with all that sampling may be asked for")
FIRST_WITH_SECOND_RUNNER: Version = (0, 22)
#: ``DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`` and the conditions beside it (config/vllm.py).
_SECOND_RUNNER_FOR = {"qwen3", "llama", "mistral", "deepseek_v2", "deepseek_v3"}
_SECOND_RUNNER_OF_EXPERTS = {"deepseek_v2", "deepseek_v3"}


#: Cards of less went to the first engine as long as there was one (engine/arg_utils.py, ``_is_v1_supported_oracle``).
_SECOND_ENGINE_CAPABILITY, _ONE_ENGINE = (8, 0), (0, 10)


def spreads_embeddings(version: Version) -> bool:
    """True if the profile run writes embeddings into tensors of all tokens of the largest item, or more."""
    return EMBEDDINGS_SPREAD.holds(version) and not EMBEDDINGS_ALONE.holds(version)


def has_second_engine(version: Version, capability: tuple[int, int]) -> bool:
    """True if a card is served by the second engine."""
    known = version >= _ONE_ENGINE or reaches(capability, _SECOND_ENGINE_CAPABILITY)
    return SECOND_ENGINE.holds(version) and known


def has_second_runner(version: Version, kind: str, *, experts: bool, states: bool, quantized: bool) -> bool:
    """True if a model of ``kind`` (``model_type``) is run by the second model runner as a rule: 0.22 knew one for a
    model without experts and quantisation, 0.24 a list, 0.25 all that have neither experts nor states."""
    if SECOND_RUNNER.holds(version):
        return True
    if version < FIRST_WITH_SECOND_RUNNER or states:
        return False
    if version < (0, 24):
        return kind == "qwen3" and not quantized
    if version < (0, 25):
        return kind in _SECOND_RUNNER_FOR
    return not experts or kind in _SECOND_RUNNER_OF_EXPERTS


#: PyTorch that a version was built with: major and minor (the wheels' requirements).
_TORCH = (
    ((0, 33), (2, 14)), ((0, 32), (2, 13)),
    ((0, 21), (2, 11)), ((0, 11), (2, 9)), ((0, 9), (2, 7)), ((0, 8), (2, 6)), ((0, 6), (2, 5)),
)  # fmt: skip


def torch_of(version: Version) -> Version:
    """The PyTorch that this version of the engine came with."""
    return next(torch for since, torch in _TORCH if version >= since)


#: Releases before the newest followed one whose answers say how far a newer version may be from it.
_LOOKED_BACK = 5


def checked(version: Version | None) -> Version:
    """The version to follow: :data:`NEWEST` for None, :data:`LAST` for one that is newer.

    Raises :class:`UsageError`.
    """
    if version is None or version > LAST:
        return NEWEST if version is None else LAST
    if version < OLDEST:
        raise UsageError(f"vLLM {_text(version)} is not followed; accepted: {_text(OLDEST)} and later")
    return version


def before_newest() -> tuple[Version, ...]:
    """The versions of the last releases, as far as they differ from one another."""
    first = (LAST[0], LAST[1] - _LOOKED_BACK)
    changes = (SPLIT_WHILE_PROFILING, LARGEST_CARDS, DEVICE_LEVEL, SECOND_RUNNER, SAMPLES_TWICE)
    return tuple(sorted({first, *(one.since for one in changes if first <= one.since < LAST)}))


def _text(version: Version) -> str:
    return ".".join(map(str, version))
