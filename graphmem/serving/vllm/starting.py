"""``python -m graphmem.serving.vllm.starting ANSWER.json``: the installed engine starts on the pretended card.

A process of its own, which :mod:`graphmem.serving.vllm.installed` begins: an engine changes the process it runs in.
What to start comes pickled on standard input from there; the engine's own figures go to the file, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from graphmem.base.dependencies import CannotTell, Watch
from graphmem.devices import Device
from graphmem.errors import GraphmemError

#: Methods of the engine's worker around which the allocator is read.
STAGES = ("load_model", "determine_available_memory")
_COUNTERS = {
    "allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current",
    "requested": "requested_bytes.all.current", "peak": "allocated_bytes.all.peak",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A start: the engine's options as on its command line, whether as a server, the card, the allocator's options, and
    the processes, one card each, that share the model; the first of them is followed."""

    options: tuple[str, ...]
    is_server: bool
    device: Device
    alloc_conf: str
    processes: int = 1


class Watched:
    """What is read while the engine starts: ``stages`` by name, the worker, and the engine, which ends with the process
    alone: its own end looks for garbage twice."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, int]] = {}
        self.worker: Any = None
        self.engine: Any = None

    @contextmanager
    def methods(self, worker_class: Any) -> Iterator[None]:
        """Until the end, the worker's methods are marked."""
        before = {name: getattr(worker_class, name) for name in STAGES}
        for name, method in before.items():
            setattr(worker_class, name, self._marked(name, method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(worker_class, name, method)

    def _marked(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def marking(worker: Any, *args: Any, **kwargs: Any) -> Any:
            self.worker = worker
            gc.freeze()
            self._note(f"before {name}")
            result = method(worker, *args, **kwargs)
            self._note(f"after {name}")
            return result

        return marking

    def _note(self, stage: str) -> None:
        counters = import_module("torch").cuda.memory_stats()
        self.stages[stage] = {name: int(counters.get(counter, 0)) for name, counter in _COUNTERS.items()}


def main() -> None:
    """Start, and write the figures; an error of the engine's is among them."""
    asked: Asked = pickle.load(sys.stdin.buffer)
    out = Path(sys.argv[1])
    watch = Watch((str(out.parent),), programs=True)
    # The engine looks for garbage at every stage, among a million objects of its modules and of its model, which stay.
    # Put aside from the beginning on, they are not given back by the capture either.
    gc.freeze()
    watched, found = Watched(), dict[str, Any]()

    def step() -> None:
        try:
            found.update(_start(asked, watched))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found.update(_of_worker(watched.worker), stages=watched.stages)

    with watch.on():
        from graphmem import Training, analyze

        training = Training(world_size=asked.processes) if asked.processes > 1 else None
        try:
            analyze(step, training=training, device=asked.device, alloc_conf=asked.alloc_conf or None)
        except GraphmemError:  # an engine that ended early, with nothing on the card, has said why
            if "error" not in found:
                raise
    with suppress(CannotTell):
        found["dependencies"] = watch.written()
    out.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the engine's own end asks for a card


def _start(asked: Asked, watched: Watched) -> dict[str, Any]:
    worker = import_module("vllm.v1.worker.gpu_worker").Worker
    arguments = import_module("vllm.engine.arg_utils").EngineArgs
    context = import_module("vllm.usage.usage_lib").UsageContext
    parser = arguments.add_cli_args(_parser_class()())
    args = arguments.from_cli_args(parser.parse_args(list(asked.options)))
    engine_class = import_module("vllm.v1.engine.llm_engine").LLMEngine
    _leave_out_warm_up()
    gc.freeze()
    with watched.methods(worker):
        watched.engine = engine_class.from_engine_args(
            args, usage_context=context.OPENAI_API_SERVER if asked.is_server else context.LLM_CLASS
        )
    return _of_engine(watched.engine.engine_core.engine_core)


def _leave_out_warm_up() -> None:
    """What follows when the cache is cut, kernels that are warmed up and graphs that are captured for use, changes none
    of the figures."""
    executor = import_module("vllm.v1.executor.abstract").Executor
    if hasattr(executor, "compile_or_warm_up_model"):  # since 0.32 a step of its own
        executor.compile_or_warm_up_model = lambda _: None


def _parser_class() -> Any:
    """``FlexibleArgumentParser``, which moved (vllm/utils, since 0.12 vllm/utils/argparse_utils.py)."""
    for name in ("vllm.utils.argparse_utils", "vllm.utils"):
        try:
            return import_module(name).FlexibleArgumentParser
        except (ImportError, AttributeError):
            continue
    raise ImportError("vLLM has no FlexibleArgumentParser")


# --- the engine's figures ---------------------------------------------------------------------------------------------


def _of_worker(worker: Any) -> dict[str, Any]:
    """Of the worker, as far as it came: bytes."""
    if worker is None:
        return {}
    names = {
        "requested": "requested_memory", "available": "available_kv_cache_memory_bytes",
        "graphs_estimate": "cudagraph_memory_estimate",
    }  # fmt: skip
    found = {name: int(getattr(worker, attribute, 0) or 0) for name, attribute in names.items()}
    found["weights"] = int(getattr(getattr(worker, "model_runner", None), "model_memory_usage", 0) or 0)
    snapshot = getattr(worker, "init_snapshot", None)
    found["total"] = int(getattr(snapshot, "total_memory", 0) or 0)
    return {**found, "settings": _settings(worker.vllm_config, worker)}


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
    """Of the KV cache, as it was cut; encoders have no groups of layers with one."""
    cache = core.scheduler.kv_cache_config
    config = core.vllm_config
    utils = import_module("vllm.v1.core.kv_cache_utils")
    groups = [_group(group) for group in cache.kv_cache_groups]
    return {
        "blocks": cache.num_blocks,
        "concurrency": float(utils.get_max_concurrency_for_kv_cache_config(config, cache)) if groups else 0.0,
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


if __name__ == "__main__":
    main()
