"""Steps vLLM's own scheduler over loads, without a model, a card or a worker: batches are asked for and come back.

Runs where vllm 0.32.0 lies on the path (unpacked is enough: nothing compiled is needed) with PyTorch for the CPU.
Modules that are missing and that no scheduler calls are stood in for. Usage: step_scheduler.py LOADS.json OUT.json
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

#: Requirements of the engine that no scheduler calls.
_STOOD_IN = frozenset(
    (
        "aiohttp", "anthropic", "blake3", "compressed_tensors", "cpuinfo", "cv2", "depyf", "einops", "fastapi", "gguf",
        "ijson", "lark", "llguidance", "lmformatenforcer", "mcp", "mistral_common", "model_hosting_container_standards",
        "numba", "openai", "openai_harmony", "opentelemetry", "outlines_core", "partial_json_parser",
        "prometheus_client", "prometheus_fastapi_instrumentator", "sentencepiece", "setproctitle", "soundfile",
        "starlette", "tiktoken", "tvm_ffi", "uvicorn", "uvloop", "watchfiles", "xgrammar", "zmq",
    )
)  # fmt: skip


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __or__(cls, other: object) -> Any:
        return Any

    __ror__ = __or__


class _Thing(metaclass=_Kind):
    """Anything that a module is asked for: a class, which may be called, derived from and checked against."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def __init_subclass__(cls, **options: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> Any:
        return cls

    def __call__(self, *arguments: Any, **options: object) -> Any:
        return arguments[0] if arguments else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def _thing(name: str) -> Any:
    return _Kind(name, (_Thing,), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for them, installed or not."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.split(".")[0] not in _STOOD_IN:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def _scheduler(load: dict[str, Any]) -> Any:
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    groups = []
    for number, window in enumerate(load["windows"]):
        shape = {"block_size": load["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
        spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(sliding_window=window, **shape)
        groups.append(KVCacheGroupSpec([f"layer{number}"], spec))
    cache = KVCacheConfig(num_blocks=load["blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
    asynchronous = load["batches_in_flight"] > 1
    nothing = MagicMock()
    nothing.kv_cache_metrics = nothing.per_request_spec_decode_metrics = None
    nothing.enable_logging_iteration_details = False
    config = MagicMock()
    config.scheduler_config = SimpleNamespace(
        max_num_seqs=load["max_num_seqs"], max_num_active_seqs=None, max_num_scheduled_tokens=None,
        max_num_batched_tokens=load["max_num_batched_tokens"], long_prefill_token_threshold=0,
        long_prefill_token_threshold_adaptive=False, policy="fcfs", watermark=0.0, scheduler_reserve_full_isl=True,
        enable_chunked_prefill=True, async_scheduling=asynchronous, max_num_queued_reqs=None,
    )  # fmt: skip
    config.cache_config = SimpleNamespace(
        num_gpu_blocks=load["blocks"], enable_prefix_caching=load["prefix_caching"], mamba_cache_mode="none",
        enable_mamba_shared_prefix_checkpoint=False,
    )  # fmt: skip
    config.model_config = SimpleNamespace(
        uses_mrope=False, is_encoder_decoder=False, max_model_len=load["max_model_len"], runner_type="generate",
        is_diffusion=False, supports_multimodal_inputs=False, return_sampling_mask=False,
    )  # fmt: skip
    config.parallel_config = SimpleNamespace(
        data_parallel_index=0, decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
    )
    config.observability_config = nothing
    config.kv_events_config = config.kv_transfer_config = config.ec_transfer_config = config.lora_config = None
    config.speculative_config = None
    config.num_speculative_tokens = config.num_lookahead_tokens = config.num_prefill_lookahead_tokens = 0
    config.max_concurrent_batches = load["batches_in_flight"]
    config.max_in_flight_tokens = load["batches_in_flight"] * load["max_num_batched_tokens"]
    config.use_v2_model_runner, config.is_mm_encoder_only = True, False
    config.aux_output_config.enabled = False
    grammar = MagicMock()
    grammar.accept_tokens.return_value = True
    kind = AsyncScheduler if asynchronous else Scheduler
    return kind(config, cache, grammar, block_size=load["block_size"], log_stats=False)


def _request(number: int, prompt: int, output: int, hasher: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    tokens = [number * 1_000_003 + position for position in range(prompt)]  # nobody shares a prefix
    sampling = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    return Request(str(number), tokens, sampling, None, block_hasher=hasher)


def stepped(load: dict[str, Any]) -> list[list[Any]]:
    """Every step: [tokens by request in their order, requests preempted, blocks used after it was scheduled, requests
    finished when the oldest batch came back]."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput

    init_none_hash(sha256)
    hasher = get_request_block_hasher(load["block_size"], sha256) if load["prefix_caching"] else None
    scheduler = _scheduler(load)
    pool = scheduler.kv_cache_manager.block_pool
    arrivals = deque(sorted(range(len(load["requests"])), key=lambda number: load["requests"][number][0]))
    pending: deque[tuple[Any, list[bool]]] = deque()
    steps: list[list[Any]] = []
    while arrivals or scheduler.requests:
        while arrivals and (load["requests"][arrivals[0]][0] <= len(steps) or not scheduler.requests):
            number = arrivals.popleft()
            scheduler.add_request(_request(number, *load["requests"][number][1:], hasher))
        before = [str(request.request_id) for request in scheduler.running]
        output = scheduler.schedule()
        after = {request.request_id for request in scheduler.running}
        preempted = [int(name) for name in reversed(before) if name not in after]
        tokens = {int(name): count for name, count in output.num_scheduled_tokens.items()}
        used = load["blocks"] - 1 - pool.get_num_free_blocks()
        samples = [not scheduler.requests[str(number)].is_prefill_chunk for number in tokens]
        pending.append((output, samples))
        done: list[int] = []
        if len(pending) >= load["batches_in_flight"]:
            oldest, sampled = pending.popleft()
            names = list(oldest.num_scheduled_tokens)
            known = set(scheduler.requests)
            scheduler.update_from_output(
                oldest,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[[7] if one else [] for one in sampled],
                ),
            )
            done = sorted(int(name) for name in known - set(scheduler.requests))
        steps.append([[[number, count] for number, count in tokens.items()], preempted, used, done])
        if len(steps) > 20_000:
            raise SystemExit("the load does not end")
    return steps


def main() -> int:
    """Step every load of a file."""
    sys.meta_path.insert(0, _Missing())
    with open(sys.argv[1], encoding="utf-8") as file:
        loads = json.load(file)
    answers = [load | {"steps": stepped(load)} for load in loads]
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answers, file, separators=(",", ":"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
