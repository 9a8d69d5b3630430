"""ONNX Runtime with the CUDA execution provider: its plan, its arena, its provider options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from graphmem.allocators.bfc import BumpDriver
from graphmem.allocators.onnxruntime_arena import ArenaConfig, BFCArena, ExtendStrategy
from graphmem.errors import UsageError
from graphmem.graph.liveness import plan_liveness
from graphmem.graph.model import Graph
from graphmem.trace import Category, Place, Trace
from graphmem.units import parse_bytes

STRATEGIES = {strategy.name: strategy for strategy in ExtendStrategy} | {str(s.value): s for s in ExtendStrategy}

#: Accepted options: ``gpu_mem_limit`` and ``arena_extend_strategy`` of the CUDA provider, the rest of ``OrtArenaCfg``
#: (onnxruntime_c_api.h, ``CreateArenaCfgV2``), each with the field of the arena it sets.
OPTIONS = {
    "arena_extend_strategy": "arena_extend_strategy",
    "gpu_mem_limit": "max_mem",
    "max_mem": "max_mem",
    "initial_chunk_size_bytes": "initial_chunk_size_bytes",
    "max_dead_bytes_per_chunk": "max_dead_bytes_per_chunk",
    "initial_growth_chunk_size_bytes": "initial_growth_chunk_size_bytes",
    "max_power_of_two_extend_bytes": "max_power_of_two_extend_bytes",
}


def plan(graph: Graph, *, iterations: int = 2) -> Trace:
    """The trace of a session: initializers in phase ``load``, then ``iterations`` runs (two show the steady state)."""
    return plan_liveness(graph, iterations=iterations)


def parse_options(text: str) -> ArenaConfig:
    """Read ``key:value,key:value`` under ONNX Runtime's own names.

    Sizes are bytes and take units (``2GiB``); ``-1`` is ONNX Runtime's default, as in ``OrtArenaCfg``. Raises
    :class:`~graphmem.errors.UsageError` listing what is accepted.
    """
    config = ArenaConfig()
    seen: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (part.strip() for part in entry.partition(":"))
        if key not in OPTIONS:
            raise UsageError(f"ONNX Runtime has no arena option {key!r}; accepted: {', '.join(OPTIONS)}")
        if not separator or not value:
            raise UsageError(f"{key} has no value; write {key}:VALUE")
        field = OPTIONS[key]
        if field in seen:
            raise UsageError(f"{key} is given after {seen[field]}; give one of them once")
        seen[field] = key
        if field == "arena_extend_strategy":
            if value not in STRATEGIES:
                raise UsageError(f"arena_extend_strategy is {value!r}; accepted: {', '.join(STRATEGIES)}")
            config = replace(config, arena_extend_strategy=STRATEGIES[value])
        elif value != "-1":
            config = _with_size(config, field, parse_bytes(value))
    return config


def _with_size(config: ArenaConfig, field: str, size: int) -> ArenaConfig:
    changes: dict[str, Any] = {field: size}
    return replace(config, **changes)


def initializer_count(trace: Trace) -> int:
    """How many device allocations of ``trace`` are initializers: those a session reserves while it loads."""
    return sum(
        storage.category == Category.PARAMETER and storage.place == Place.DEVICE and storage.bytes > 0
        for storage in trace.storages
    )


class OnnxRuntimeSession(BFCArena):
    """The arena as a session uses it: the first ``initializers`` allocations are reserved, each at its exact size.

    1.31.1 takes deserialised initializers with ``Reserve`` whatever ``session.use_device_allocator_for_initializers``
    says (measured on the CPU provider; the CUDA provider shares that code). Requests of 0 bytes do not count.
    """

    def __init__(
        self,
        config: ArenaConfig | None = None,
        *,
        initializers: int = 0,
        driver_alloc: Callable[[int], int | None] | None = None,
        driver_free: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(config, driver_alloc=driver_alloc, driver_free=driver_free)
        self._to_reserve = initializers

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """Reserve an initializer, or allocate. Raises :class:`~graphmem.errors.DeviceOutOfMemory`."""
        if size and self._to_reserve:
            self._to_reserve -= 1
            return self.reserve(size)
        return super().malloc(size, stream)


def default_allocator(
    options: str | Mapping[str, object] = "",
    capacity: int | None = None,
    *,
    initializers: int = 0,
    driver_alloc: Callable[[int], int | None] | None = None,
    driver_free: Callable[[int], None] | None = None,
) -> OnnxRuntimeSession:
    """A fresh session's allocator.

    ``options`` are provider options, as text or by name; ``capacity`` is what the device can give, in bytes;
    ``initializers`` is :func:`initializer_count` of the trace to replay. Raises
    :class:`~graphmem.errors.UsageError`.
    """
    text = options if isinstance(options, str) else ",".join(f"{key}:{value}" for key, value in options.items())
    if driver_alloc is None:
        driver = BumpDriver(capacity)
        driver_alloc, driver_free = driver.alloc, driver.free
    return OnnxRuntimeSession(
        parse_options(text), initializers=initializers, driver_alloc=driver_alloc, driver_free=driver_free
    )
