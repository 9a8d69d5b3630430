"""vLLM's start on the pretended card, for :mod:`graphmem.serving.starting`, and its figures."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

from graphmem.serving.starting import Asked, Watched

#: Methods of the engine's worker around which the allocator is read.
STAGES = ("load_model", "determine_available_memory")


def start(asked: Asked, watched: Watched) -> dict[str, Any]:
    """Start the engine; its KV cache."""
    worker = import_module("vllm.v1.worker.gpu_worker").Worker
    arguments = import_module("vllm.engine.arg_utils").EngineArgs
    context = import_module("vllm.usage.usage_lib").UsageContext
    parser = arguments.add_cli_args(_parser_class()())
    args = arguments.from_cli_args(parser.parse_args(list(asked.options)))
    engine_class = import_module("vllm.v1.engine.llm_engine").LLMEngine
    _leave_out_warm_up(worker)
    if "--pipeline-parallel-size" in asked.options:
        _allow_pipelines()
    gc.freeze()
    with watched.methods(worker, STAGES):
        watched.engine = engine_class.from_engine_args(
            args, usage_context=context.OPENAI_API_SERVER if asked.is_server else context.LLM_CLASS
        )
        if STAGES[-1] not in watched.results:  # a model without a cache is not profiled when it starts
            watched.owner.determine_available_memory()
    return _of_engine(watched.engine.engine_core.engine_core)


def _leave_out_warm_up(worker: Any) -> None:
    """What follows when the cache is cut, kernels that are warmed up and graphs that are captured for use, changes none
    of the figures. Before 0.32 the executor asks its workers in a step with the cache, for the seconds that it took:
    one number, since 0.19 two."""
    executor = import_module("vllm.v1.executor.abstract").Executor
    if hasattr(executor, "compile_or_warm_up_model"):
        executor.compile_or_warm_up_model = lambda _: None
    core: Any = sys.modules.get("vllm.v1.engine.core")
    if hasattr(core, "freeze_gc_heap"):  # the last thing of all: a look through a million objects, put aside afterwards
        core.freeze_gc_heap = lambda: None
    times = getattr(import_module("vllm.v1.worker.worker_base"), "CompilationTimes", None)
    worker.compile_or_warm_up_model = lambda _: 0.0 if times is None else times(0.0, 0.0)


def _allow_pipelines() -> None:
    """The second runner lacks nothing in a pipeline whose processes begin as torchrun begins them, but that its answer
    is on the last of them alone."""
    config = import_module("vllm.config.vllm").VllmConfig
    name = "_get_v2_model_runner_unsupported_features"
    lacks = getattr(config, name, None)
    if lacks is not None:
        setattr(config, name, lambda self: [one for one in lacks(self) if "external_launcher" not in one])


def _parser_class() -> Any:
    """``FlexibleArgumentParser``, which moved (vllm/utils, since 0.12 vllm/utils/argparse_utils.py)."""
    for name in ("vllm.utils.argparse_utils", "vllm.utils"):
        try:
            return import_module(name).FlexibleArgumentParser
        except (ImportError, AttributeError):
            continue
    raise ImportError("vLLM has no FlexibleArgumentParser")


# --- the engine's figures ---------------------------------------------------------------------------------------------


def figures(watched: Watched) -> dict[str, Any]:
    """Of the worker, as far as it came: bytes; 0 for what its version does not keep."""
    worker = watched.owner
    if worker is None:
        return {}
    runner, snapshot = getattr(worker, "model_runner", None), getattr(worker, "init_snapshot", None)
    found = {
        "requested": getattr(worker, "requested_memory", 0),
        "available": watched.results.get("determine_available_memory"),
        "graphs_estimate": getattr(worker, "cudagraph_memory_estimate", 0),
        "weights": getattr(runner, "model_memory_usage", 0),
        "total": getattr(snapshot, "total_memory", 0),
    }
    sizes = {name: int(value or 0) for name, value in found.items()}
    return {**sizes, "flashinfer": _has_flashinfer(), "settings": _settings(worker.vllm_config, worker)}


def _has_flashinfer() -> bool | None:
    """Whether FlashInfer's kernels are there or can be built here; None where the version does not say."""
    has = getattr(sys.modules.get("vllm.utils.flashinfer"), "has_flashinfer", None)
    return None if has is None else bool(has())


def _settings(config: Any, worker: Any) -> dict[str, Any]:
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    sizes = [] if model.enforce_eager else list(config.compilation_config.cudagraph_capture_sizes or ())
    return {
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_dtype": str(cache.cache_dtype),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "block_size": cache.block_size,
        "enforce_eager": bool(model.enforce_eager),
        "cudagraph_capture_sizes": sizes,
        "model_runner": "V2" if getattr(worker, "use_v2_model_runner", False) else "V1",
        "architecture": ", ".join(model.architectures or ()),
        "batches_in_flight": int(getattr(config, "max_concurrent_batches", 0) or 0),
    }


def _of_engine(core: Any) -> dict[str, Any]:
    """Of the KV cache, as it was cut; encoders have no groups of layers with one, and old versions no concurrency."""
    cache = core.scheduler.kv_cache_config
    config = core.vllm_config
    utils = import_module("vllm.v1.core.kv_cache_utils")
    concurrency = getattr(utils, "get_max_concurrency_for_kv_cache_config", None)  # since 0.10
    groups = [_group(group) for group in cache.kv_cache_groups]
    return {
        "blocks": cache.num_blocks,
        "concurrency": float(concurrency(config, cache)) if groups and concurrency else 0.0,
        "groups": groups,
    }


def _group(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    kind, chunk = type(spec).__name__, getattr(spec, "attention_chunk_size", None)
    chunk = chunk if kind.startswith("ChunkedLocal") else None
    return {
        "kind": kind,
        "layers": len(group.layer_names),
        "page_bytes": int(spec.page_size_bytes),
        "block_size": int(spec.block_size),
        "window": getattr(spec, "sliding_window", None) if kind.startswith("SlidingWindow") else chunk,
        "in_chunks": chunk is not None,
        "is_state": kind.startswith("Mamba"),
        "is_whole": kind == "UniformTypeKVCacheSpecs",
    }
