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
from zlib import crc32

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
        disable_hybrid_kv_cache_manager=False,
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
    config.kv_transfer_config = None
    if "transfer_steps" in load:
        _connected(config, load)
    config.kv_events_config = config.ec_transfer_config = config.lora_config = None
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


def _connected(config: Any, load: dict[str, Any]) -> None:
    """With ``--kv-offloading-size`` for so many blocks (64 bytes here, and pages of the host have 4 KiB), or as one of
    two engines with NIXL between them."""
    from vllm.config import KVTransferConfig

    if load.get("host_blocks"):
        size = {"cpu_bytes_to_use": load["host_blocks"] * 4096}
        transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": size}
    else:
        transfer = {"kv_connector": "NixlConnector"}
    config.kv_transfer_config = KVTransferConfig(kv_role="kv_both", **transfer)
    parallel = config.parallel_config
    parallel.rank, parallel.world_size, parallel.tensor_parallel_size, parallel.data_parallel_size = 0, 1, 1, 1
    parallel.data_parallel_rank_local, parallel.distributed_executor_backend, parallel.nnodes_within_dp = None, "uni", 1
    config.model_config.use_mla, config.model_config.model, config.model_config.dtype = False, "", "float16"
    config.model_config.get_total_num_kv_heads = lambda: 1
    cache = config.cache_config
    cache.prefix_cache_retention_interval = cache.kv_cache_layout = cache.prefix_match_unit = None
    cache.hash_block_size, cache.cache_dtype, cache.block_size = None, "auto", load["block_size"]


class _Worker:
    """The transfers of the worker's side: a store is over with the step behind its own, others some steps later."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._stores: list[int] = []
        self._under_way: list[tuple[int, Any]] = []
        self._sends: set[str] = set()
        self._step = 0

    def executed(self, metadata: Any) -> Any:
        """The output of a step with these new jobs."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        offloads = hasattr(metadata, "load_jobs")
        new = metadata.load_jobs.items() if offloads else [*metadata.reqs_to_recv, *metadata.reqs_to_send]
        self._under_way += [(self._step + self._steps, one) for one in new]
        self._sends |= set() if offloads else set(metadata.reqs_to_send)
        done = [one for step, one in self._under_way if step <= self._step]
        self._under_way = [one for one in self._under_way if one[0] > self._step]
        self._step += 1
        if not offloads:
            ours: list[Any] = [[name for name in done if (name in self._sends) == sends] for sends in (False, True)]
            return KVConnectorOutput(finished_recving=ours[0], finished_sending=ours[1])  # a set's order is any
        jobs = OffloadingWorkerMetadata(dict.fromkeys([*self._stores, *(name for name, _ in done)], 1))
        self._stores = list(metadata.store_jobs)
        return KVConnectorOutput(finished_recving=[job.req_id for _, job in done], kv_connector_worker_meta=jobs)


def _request(number: int, prompt: int, output: int, shared: Any, hasher: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    tokens = [number * 1_000_003 + position for position in range(prompt)]  # its own
    start = 0
    for name, end in shared:
        tokens[start:end] = [-(crc32(name.encode()) * 1_000_003 + position) for position in range(start, end)]
        start = end
    sampling = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    return Request(str(number), tokens, sampling, None, block_hasher=hasher)


#: What a proxy gives to requests of an engine that only prefills, and of one that decodes.
_REMOTE = {
    "prefill": {"do_remote_decode": True},
    "decode": {
        "do_remote_prefill": True, "remote_block_ids": ([1],), "remote_engine_id": "other", "remote_request_id": "0",
        "remote_host": "localhost", "remote_port": 1, "tp_size": 1,
    },
}  # fmt: skip


def _unfinished(scheduler: Any) -> set[str]:
    """Requests that are not finished; of those that are some wait until they have been sent."""
    return {name for name, request in scheduler.requests.items() if not request.is_finished()}


def stepped(load: dict[str, Any]) -> list[list[Any]]:
    """Every step: [tokens by request in their order, requests preempted, blocks used after it was scheduled, requests
    finished when the oldest batch came back]."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput

    init_none_hash(sha256)
    hasher = get_request_block_hasher(load["block_size"], sha256) if load["prefix_caching"] else None
    scheduler = _scheduler(load)
    worker = _Worker(load["transfer_steps"]) if "transfer_steps" in load else None
    pool = scheduler.kv_cache_manager.block_pool
    arrivals = deque(sorted(range(len(load["requests"])), key=lambda number: load["requests"][number][0]))
    pending: deque[tuple[Any, list[bool]]] = deque()
    steps: list[list[Any]] = []
    while arrivals or _unfinished(scheduler):
        while arrivals and (load["requests"][arrivals[0]][0] <= len(steps) or not _unfinished(scheduler)):
            number = arrivals.popleft()
            _, prompt, output, *shared = load["requests"][number]
            request = _request(number, prompt, output, shared[0] if shared else (), hasher)
            request.kv_transfer_params = dict(_REMOTE[load["role"]]) if "role" in load else None
            scheduler.add_request(request)
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
            known = _unfinished(scheduler)
            scheduler.update_from_output(
                oldest,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    kv_connector_output=worker.executed(oldest.kv_connector_metadata) if worker else None,
                    sampled_token_ids=[[int(name)] if one else [] for name, one in zip(names, sampled, strict=True)],
                ),
            )
            done = sorted(int(name) for name in known - _unfinished(scheduler))
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
