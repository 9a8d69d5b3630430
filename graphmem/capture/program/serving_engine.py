"""Serving engines inside a capture: vLLM runs in the process that is analysed, where its user would start others.

``LLM(...)`` starts its core in a process of its own, unless its environment says otherwise, and asks another process
what a class of models can do, so as not to touch the card. Here both are this process: neither changes what is on the
card. What it would run at the interpreter's end, when there is no card any more, is not run.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from graphmem.base.environment import changed
from graphmem.capture.compile.same_pieces import compiled_once
from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.distributed.process_groups import NCCL_VERSION
from graphmem.capture.patches import Patches, constant

#: Of its environment (vllm/envs.py): one process, compiled code that is not kept (nor is there any of former starts,
#: which would be a card's), and nothing told to its makers. A library of its kernels (humming/ops/utils.py,
#: humming/utils/nvrtc.py, 0.1.17) begins to build a launcher when it is imported, in two processes that import PyTorch.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1", "HUMMING_DISABLE_PARALLEL_BUILD": "1",
}  # fmt: skip


@contextlib.contextmanager
def engine_in_process() -> Iterator[None]:
    """Let an engine that is imported start in this process, until the end."""
    try:
        with changed(_ENVIRONMENT), patched_imports(_FOLLOWED):
            yield
    finally:
        _forget_finalizers()


def _forget_finalizers() -> None:
    """What the engine's objects do when they end, with the interpreter at the latest (``weakref.finalize``), asks for
    the card."""
    known: Any = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(known):
        found = finalizer.peek()
        if found is not None and str(getattr(found[1], "__module__", "")).startswith("vllm."):
            finalizer.detach()


def _follow_registry(patches: Patches, registry: ModuleType) -> None:
    """What a model's class can do is asked here (``_run_in_subprocess``, models/registry.py, 0.32)."""

    def here(function: Callable[[], object]) -> object:
        return function()

    patches.where_found((registry,), {"_run_in_subprocess": here})


def _follow_warmup(patches: Patches, warmup: ModuleType) -> None:
    """Kernels in CuTe are compiled for the card by its driver, and FlashInfer's (where there is a compiler) are timed:
    behind the profile run, when the cache is there."""
    left_out = ("_warmup_ll_bf16_router_gemm", "cutedsl_warmup", "flashinfer_autotune")
    patches.where_found((warmup,), dict.fromkeys(left_out, constant(None)))


def _follow_compiler(patches: Patches, backends: ModuleType) -> None:
    """Layers of a model are alike, and its compiler has a cache by which it knows them, which there is not here."""
    manager = getattr(backends, "CompilerManager", None)
    if manager is not None:
        patches.around(manager, {"compile": compiled_once})


def _follow_nccl(patches: Patches, wrapper: ModuleType) -> None:
    """Its own communicators call NCCL's library (pynccl_wrapper.py, 0.32): every call is done at once, and writes into
    tensors that exist."""

    def load(library: Any, *_: object) -> None:
        library._funcs = {one.name: constant(0) for one in library.exported_functions}
        library._funcs["ncclGetVersion"] = _give_version

    patches.where_found((wrapper.NCCLLibrary,), {"__init__": load})


def _give_version(pointer: Any) -> int:
    major, minor, patch = NCCL_VERSION
    pointer._obj.value = major * 10_000 + minor * 100 + patch
    return 0


def _follow_groups(patches: Patches, state: ModuleType) -> None:
    """Whether processes share their machine's memory is tried out among them (parallel_state.py): they do."""

    def in_the_same_node_as(group: Any, source_rank: int = 0) -> list[bool]:
        del source_rank
        return [True] * (group.size() if callable(getattr(group, "size", None)) else group.world_size)

    patches.where_found((state,), {"in_the_same_node_as": in_the_same_node_as})


def _follow_queues(patches: Patches, broadcast: ModuleType) -> None:
    """A queue in shared memory waits for its readers; what goes through it is on the host."""
    patches.where_found((broadcast.MessageQueue,), {"create_from_process_group": staticmethod(constant(None))})


def _follow_replicas(patches: Patches, coordination: ModuleType) -> None:
    """Replicas tell each other how many tokens their batches have; here all have as many, as while they profile."""
    patches.where_found((coordination,), {"should_skip_dp_coordination": constant(True)})


# --- sleep mode -------------------------------------------------------------------------------------------------------


def _follow_sleep(patches: Patches, cumem: ModuleType) -> None:
    """Sleep mode (device_allocator/cumem.py, 0.32): pools whose memory comes from an extension, which gives it back to
    the driver and maps it again while PyTorch counts it as allocated. Here pools are PyTorch's own and do the same."""

    @contextlib.contextmanager
    def pool_of_its_own(*_: object) -> Iterator[tuple[Any, None]]:
        memory = import_module("torch").cuda.memory
        pool = memory.MemPool()
        with memory.use_mem_pool(pool):
            yield pool, None

    deferrable = getattr(cumem, "DEFERRABLE_TAGS", ())
    sleeping = {
        "_trim": lambda _, pool: pool.give_back_free(),
        "sleep": _sleep, "discard": _discard,
        "wake_up": lambda allocator, tags=None: _wake_up(allocator, tags, deferrable),
        "get_current_usage": lambda allocator: sum(pool.live_bytes() for _, pool in _tagged(allocator)),
    }  # fmt: skip
    patches.where_found((cumem.CuMemAllocator,), sleeping)
    patches.where_found(
        (cumem,),
        {
            "use_memory_pool_with_allocator": pool_of_its_own,
            "get_pluggable_allocator": lambda *_: SimpleNamespace(_allocator=None),
        },
    )


def _tagged(allocator: Any) -> list[tuple[str, Any]]:
    """The pools of an allocator of sleep mode, each with its tag: 'weights', 'kv_cache', ..."""
    return [(tag, pool) for tag, pools in allocator.allocator_and_pools.items() for pool, _ in pools]


def _sleep(allocator: Any, offload_tags: tuple[str, ...] | str | None = None) -> None:
    """Everything goes from the card; what has one of these tags is kept in pinned memory of the host."""
    offloaded = (allocator.default_tag,) if offload_tags is None else offload_tags
    _give_back(allocator, None, (offloaded,) if isinstance(offloaded, str) else offloaded)
    _empty_cache()


def _discard(allocator: Any, tags: tuple[str, ...] | str) -> None:
    _give_back(allocator, (tags,) if isinstance(tags, str) else tags, ())


def _give_back(allocator: Any, tags: tuple[str, ...] | None, offloaded: tuple[str, ...]) -> None:
    torch = import_module("torch")
    kept = vars(allocator).setdefault("kept_on_host", {})
    for tag, pool in _tagged(allocator):
        if tags is None or tag in tags:
            size = pool.live_bytes()
            if size and tag in offloaded:
                kept[pool] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            pool.sleep()


def _wake_up(allocator: Any, tags: list[str] | None, deferrable: tuple[str, ...]) -> None:
    _empty_cache()
    kept = vars(allocator).setdefault("kept_on_host", {})
    for tag, pool in _tagged(allocator):
        if tags is None or tag in tags or (deferrable and tag not in deferrable):
            pool.wake()
            kept.pop(pool, None)


def _empty_cache() -> None:
    gc.collect()
    import_module("torch").cuda.empty_cache()


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _follow_segments(patches: Patches, graphs: ModuleType) -> None:
    """Whether a stream is captured is asked of the driver, past PyTorch (``_is_stream_capturing``, 0.5.23)."""

    def is_stream_capturing(stream: Any) -> bool:
        cuda = import_module("torch").cuda
        with cuda.stream(stream):
            return bool(cuda.is_current_stream_capturing())

    patches.where_found((graphs,), {"_is_stream_capturing": is_stream_capturing})


# ----------------------------------------------------------------------------------------------------------------------

#: Of groups of processes, which SGLang has from vLLM.
_GROUPS = {
    "device_communicators.pynccl_wrapper": _follow_nccl,
    "device_communicators.shm_broadcast": _follow_queues,
    "parallel_state": _follow_groups,
}
_FOLLOWED = {
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph": _follow_segments,
    **{
        f"{package}.{module}": follow
        for package in ("vllm.distributed", "sglang.srt.distributed")
        for module, follow in _GROUPS.items()
    },
    "vllm.device_allocator.cumem": _follow_sleep,
    "vllm.compilation.backends": _follow_compiler,
    "vllm.model_executor.models.registry": _follow_registry,
    "vllm.model_executor.warmup.kernel_warmup": _follow_warmup,
    "vllm.v1.worker.dp_utils": _follow_replicas,
}
