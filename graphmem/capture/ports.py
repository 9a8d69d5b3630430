"""The protocols by which the rooms of a capture know its recorder, one a purpose, so that a room can be read, and tried
out, without the recorder behind it. :mod:`graphmem.capture.record` fulfils them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from graphmem.base.textbook import Sharded
from graphmem.trace import Category, TraceBuilder

#: What PyTorch calls a pool: {0, n} made by the user (MemPool, graph_pool_handle), {n, 0} by a graph for itself
#: (``MemPool::graph_pool_handle``, ATen/cuda/MemPool.h).
PoolId = tuple[int, int]


class DeviceMemory(Protocol):
    """The card's memory as the allocator keeps it while the program runs. All figures are bytes."""

    def follow(self, builder: TraceBuilder) -> None:
        """Answer for the events of ``builder``, those to come included."""

    def lift_limit(self) -> None:
        """From now on no request is refused."""

    def refusal(self, index: int) -> str | None:
        """PyTorch's message where the request for storage ``index``, recorded just now, is out of memory."""

    def statistics(self) -> dict[str, Any]:
        """The result of ``torch._C._cuda_memoryStats`` now."""

    def reset_peaks(self) -> None: ...

    def reset_accumulated(self) -> None: ...

    def free_bytes(self) -> int:
        """The free bytes by ``cudaMemGetInfo`` now."""

    def segments(self) -> list[dict[str, Any]]:
        """The segments of ``torch.cuda.memory_snapshot`` now."""

    @property
    def fraction(self) -> float: ...

    def fraction_set(self, fraction: float) -> None:
        """The program limits itself to this part of the card's memory; the event is recorded."""


class MemoryBook(Protocol):
    """The memory statistics that the program reads, and its calls that change them."""

    @property
    def memory(self) -> DeviceMemory | None: ...

    def settle(self) -> None:
        """Free the storages that only a handled error on the host keeps alive, before memory is read."""

    def memory_fraction(self, fraction: float) -> None: ...

    def allocator_settings(self, text: str) -> None: ...

    def allocator_event(self, name: str) -> None:
        """``synchronize`` or ``empty_cache``."""


class StreamBook(Protocol):
    """Which CUDA stream is current; streams are numbers, 0 the default one."""

    @property
    def current(self) -> int: ...

    def make_current(self, index: int) -> None: ...

    def next_of_pool(self, priority: int) -> int:
        """The number of the stream that ``torch.cuda.Stream(priority=...)`` returns next."""

    def note_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        """The nodes that accumulate these leaves' gradients are made now."""


class PoolBook(Protocol):
    """Private memory pools, and the captures of CUDA graphs that allocate in them."""

    def new_id(self, *, is_user_created: bool = True) -> PoolId: ...

    def holders(self, pool: PoolId) -> int: ...

    def create(self, pool: PoolId, label: str, *, use_on_oom: bool = False, no_split: bool = False) -> None: ...

    def begin(self, pool: PoolId, label: str, *, streams: set[int] | None, any_thread: bool = False) -> None:
        """Allocations on ``streams`` (None: on any stream of the calling thread) go to the pool from now on."""

    def end(self, pool: PoolId) -> None: ...

    def release(self, pool: PoolId) -> None: ...

    def empty(self, pool: PoolId) -> None: ...

    def captured(self, stream: int) -> Any:
        """The capture that ``stream`` takes part in; None outside one."""

    def join(self, stream: int, capture: Any) -> None:
        """``stream`` waits for work of ``capture``, if that is one, and so takes part in it."""

    def take(self, size: int, label: str) -> int:
        """A buffer of ``size`` bytes that PyTorch keeps for itself; its number."""

    def give(self, index: int) -> None: ...


class StorageBook(Protocol):
    """The storages of a run: their purposes, and their changes outside operators."""

    def births(self, category: Category, label: str) -> AbstractContextManager[None]:
        """Storages that are born in this context are for ``category``."""

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None: ...

    def resized(self, storage: torch.UntypedStorage) -> None: ...


class WorkspaceBook(Protocol):
    """The workspaces that cuBLAS keeps."""

    def clear_workspaces(self, stream: int | None = None) -> None:
        """Those of a stream, or all, are given back."""


class ValueBook(Protocol):
    """The known values of tensors."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values as a host tensor; None where they are not known."""

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From now on the tensor has these values."""


class GroupBook(Protocol):
    """The process groups of several on cards that were made with this process in them."""

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Their ranks, by PyTorch's name of the group."""

    #: This process's rank.
    rank: int

    @property
    def alone(self) -> set[str]:
        """Names of groups on cards that have this process alone."""


class RankBook(Protocol):
    """The facts of one process of several."""

    @property
    def storages(self) -> StorageBook: ...

    @property
    def streams(self) -> StreamBook: ...

    @property
    def values(self) -> ValueBook: ...

    def note_once(self, remark: str) -> None:
        """Tell the reader, once."""

    @property
    def groups(self) -> GroupBook: ...

    #: Told of the outermost module that is trained, and what it is called with.
    on_forward: Callable[[Any, Any], None] | None
    sharded: Sharded | None

    @property
    def wrappers(self) -> set[type]:
        """Classes of tensors around others: operators on them are left to those classes."""

    @property
    def unwrapped_in_cpp(self) -> set[type]:
        """Those of them whose operators are left to PyTorch's C++."""

    def paused(self) -> AbstractContextManager[None]:
        """A context whose operators are no part of the step."""


class StepBook(Protocol):
    """The marks that the default step makes in the record."""

    @property
    def operator_count(self) -> int: ...

    def begin_iteration(self) -> None: ...

    def begin_generation(self) -> None:
        """Begin the next iteration, which generates, with its ``prefill``."""

    def enter(self, stage: str) -> None:
        """Begin another stage of the iteration: ``decode``."""

    def label_model(self, model: torch.nn.Module) -> None: ...

    def label_inputs(self, inputs: object, name: str = "input") -> None: ...
