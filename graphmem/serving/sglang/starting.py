"""SGLang's start on the pretended card, for :mod:`graphmem.serving.starting`, and its figures.

The scheduler, which a server starts in a process of its own (``run_scheduler_process``, srt/managers/scheduler.py,
0.5.23), is made here: it loads the model, cuts the pool and captures CUDA graphs before it takes requests.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from graphmem.serving.starting import Asked, Watched

#: Methods of the model's runner around which the allocator is read.
STAGES = ("load_model", "alloc_memory_pool", "init_attention_backends", "init_cuda_graphs")


def start(asked: Asked, watched: Watched) -> dict[str, Any]:
    """Start the scheduler; what it found out."""
    arguments = import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    arguments.ServerArgs.add_cli_args(parser)
    given = arguments.ServerArgs.from_cli_args(parser.parse_args(list(asked.options)))
    _board(asked)
    given.resolve_once()
    context = import_module("sglang.srt.runtime_context")
    rank = context.spawn_world_rank(given, tp_rank=0, pp_rank=0)
    context.publish(given, role="scheduler", ranks=context.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    runner = import_module("sglang.srt.model_executor.model_runner").ModelRunner
    scheduler = import_module("sglang.srt.managers.scheduler").Scheduler
    with watched.methods(runner, STAGES):
        watched.engine = scheduler(given, arguments.PortArgs.init_new(given))
    return {}


def _board(asked: Asked) -> None:
    """The card's memory by ``nvidia-smi``, MiB, which defaults go by (``get_nvgpu_memory_capacity``,
    srt/utils/common.py)."""
    size = asked.device.board_bytes or asked.device.capacity_bytes
    utilities: Any = import_module("sglang.srt.utils.common")
    utilities.get_nvgpu_memory_capacity = lambda: float(size >> 20)


def figures(watched: Watched) -> dict[str, Any]:
    """Of the runner, as far as it came."""
    runner = watched.owner
    if runner is None:
        return {}
    pool = getattr(runner, "token_to_kv_pool", None)
    sizes = pool.get_kv_size_bytes() if pool is not None else 0
    model, context = runner.model_config, import_module("sglang.srt.runtime_context")
    schedule, engine = context.get_schedule(), watched.engine
    mixes = engine is None or engine.is_hybrid_swa or engine.is_hybrid_ssm
    return {
        "pool": int(sum(sizes) if isinstance(sizes, tuple) else sizes),
        "slots": int(getattr(pool, "size", 0)) + int(runner.page_size),  # a page more, for what nobody reads
        "tokens": max(0, int(getattr(runner, "max_total_num_tokens", 0) or 0)),
        "layers": int(model.num_hidden_layers),
        # whether the scheduler is one that graphmem.serving.sglang.scheduler follows
        "scheduled": schedule.schedule_policy == "fcfs" and not (schedule.enable_mixed_chunk or mixes),
        "settings": {
            "mem_fraction_static": runner.mem_fraction_static,
            "max_model_len": int(model.context_len),
            "max_num_seqs": int(getattr(runner, "max_running_requests", 0) or 0),
            "chunked_prefill_size": int(schedule.chunked_prefill_size),
            "max_prefill_tokens": int(schedule.max_prefill_tokens),
            "schedule_conservativeness": float(schedule.schedule_conservativeness),
            "disable_overlap_schedule": bool(schedule.disable_overlap_schedule),
            "disable_radix_cache": bool(context.get_memory().disable_radix_cache),
            "cuda_graph_max_bs": int(context.get_exec().graph.cuda_graph_config.decode.max_bs or 0),
            "page_size": int(runner.page_size),
            "kv_cache_dtype": str(getattr(runner, "kv_cache_dtype_str", "auto")),
            "dtype": str(model.dtype).removeprefix("torch."),
            "architecture": ", ".join(model.hf_config.architectures or ()),
        },
    }
