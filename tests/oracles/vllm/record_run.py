"""``record_run.py CASE.json OUT.json``: start the real engine with a case's settings and dummy weights on the stub
driver, and write down its own figures of memory.

The environment is vllm 0.32.0 with torch 2.13.0 for CUDA 13, or that of the case's version. What is not real: the CUDA
context, memory of cuBLAS, NCCL
and modules (growth outside torch is 0), the driver's part of CUDA graphs, autotuning by time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

CASE: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
_RANKS = math.prod(CASE["settings"].get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
if _RANKS > 1:
    os.environ |= {"RANKS": str(_RANKS), "OWN_RANK": str(CASE.get("rank", 0))}
    import one_of_ranks  # noqa: F401  before the engine
    import one_rank  # noqa: F401

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402
from vllm.v1.worker import gpu_worker, worker_base  # noqa: E402

if CASE.get("version", vllm.__version__) != vllm.__version__:
    raise SystemExit(f"vLLM {CASE['version']} is asked for, and {vllm.__version__} is installed")
try:
    import vllm.utils.mem_utils as mem_utils  # since 0.12
except ImportError:
    import vllm.utils as mem_utils
tokens: list[int] = []


class _Sizes(logging.Filter):
    """What the engine says of its KV cache."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = re.search(r"GPU KV cache size: ([0-9,]+) tokens", record.getMessage())
        tokens.extend([int(found[1].replace(",", ""))] if found else [])
        return True


# Handlers would not do: they are set anew while a model that takes images starts.
logging.getLogger("vllm.v1.core.kv_cache_utils").addFilter(_Sizes())
_COUNTERS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "requested_bytes.all.current")
stages: dict[str, dict[str, int]] = {}
results: dict[str, Any] = {}
profiles: list[Any] = []


def _marked(name: str) -> None:
    """Counters of the allocator before and after a method of the worker."""
    method = getattr(gpu_worker.Worker, name)

    def marking(self: Any, *arguments: Any, **options: Any) -> Any:
        _quieten()
        _note(f"before {name}")
        results[name] = method(self, *arguments, **options)
        _note(f"after {name}")
        return results[name]

    setattr(gpu_worker.Worker, name, marking)


def _quieten() -> None:
    """The stub cannot launch FlashInfer's kernels of the delta rule, whose workspaces are made before. They are
    imported only where the model is one of those: a module that is imported early may leave a table elsewhere."""
    if "after load_model" in stages and "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn" in sys.modules:
        import flashinfer.gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90 as kernels

        kernels.get_cached_compile = lambda *arguments, **options: lambda *arguments, **options: None


def _note(stage: str) -> None:
    counters = torch.cuda.memory_stats()
    stages[stage] = {name.split("_")[0]: counters.get(name, 0) for name in _COUNTERS}


for _name in ("load_model", "determine_available_memory"):
    _marked(_name)
_made = getattr(mem_utils.MemoryProfilingResult, "__post_init__", lambda self: None)  # since 0.14
mem_utils.MemoryProfilingResult.__post_init__ = lambda self: (_made(self), profiles.append(self))[0]

# Kernels that are warmed up once the cache is cut change none of the figures; the stub cannot compile all of them.
Executor.compile_or_warm_up_model = lambda self: None
_times = getattr(worker_base, "CompilationTimes", None)
gpu_worker.Worker.compile_or_warm_up_model = lambda self: 0.0 if _times is None else _times(0.0, 0.0)

# What prepares texts that are pooled wants a tokenizer, and has no memory of a card.
with contextlib.suppress(ImportError):
    from vllm.entrypoints.pooling import offline

    offline.init_pooling_io_processors = lambda *arguments, **options: {}

if _RANKS > 1:
    CASE["settings"]["distributed_executor_backend"] = "external_launcher"
    # The second runner lacks nothing here that it has with other launchers: it only cannot answer on all ranks.
    from vllm.config.vllm import VllmConfig

    VllmConfig._get_v2_model_runner_unsupported_features = lambda self: []

# Beside the case, as a folder of another name is another model to the cache of compiled code.
folder = Path(sys.argv[1]).with_name("model")
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(json.dumps(CASE["model_config"]))
for name, values in CASE.get("files", {}).items():
    (folder / name).write_text(json.dumps(values))
if "draft_config" in CASE:
    draft = folder / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(CASE["draft_config"]))
    CASE["settings"]["speculative_config"]["model"] = str(draft)
# A model that takes images needs its processor, so what of it lies beside the configuration.
engine = LLM(model=str(folder), skip_tokenizer_init="files" not in CASE, load_format="dummy", **CASE["settings"])
if "draft_config" in CASE:
    del CASE["settings"]["speculative_config"]["model"]
core = engine.llm_engine.engine_core.engine_core
worker = core.model_executor.driver_worker.worker
if not profiles:  # a model without a cache is not profiled when it starts
    worker.determine_available_memory()
profile = profiles[0] if profiles else None
config, cache = worker.vllm_config, core.scheduler.kv_cache_config
CASE |= {
    "total_memory": torch.cuda.mem_get_info()[1],
    "stages": stages,
    "consumed": getattr(profile, "total_consumed", None),  # these two since 0.27
    "headroom": getattr(profile, "transient_peak_headroom", None),
    "graphs_estimate": getattr(worker, "cudagraph_memory_estimate", 0),  # since 0.19
    "available": int(results["determine_available_memory"]),
    "weights": int(worker.model_runner.model_memory_usage),
    "resolved": {
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        "model_runner": "v2" if getattr(worker, "use_v2_model_runner", False) else "v1",
    },
    "blocks": cache.num_blocks,
    "tokens": tokens[0] if tokens else 0,
    "groups": [
        {"layers": len(group.layer_names), "page_bytes": group.kv_cache_spec.page_size_bytes}
        for group in cache.kv_cache_groups
    ],
}
Path(sys.argv[2]).write_text(json.dumps(CASE))
os._exit(0)
