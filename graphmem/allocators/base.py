"""The protocol of an allocator: bytes in, blocks out. No allocator sees a tensor, an operator or a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from graphmem.base.records import dataclass

#: Events that may be played at once: a request, a free, nothing that moves memory; and what ends them.
TAKE, GIVE, PASS, STOP = range(4)


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block of a segment, as a snapshot shows it. ``state`` is ``allocated``, ``pending`` (freed, waiting for a
    stream) or ``free``; ``requested_bytes`` is 0 for free blocks."""

    address: int
    size: int
    requested_bytes: int
    state: str


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One range obtained from the driver; ``blocks`` tile it in address order. ``kind`` is the allocator's own word
    (``small``, ``large``, ``region``, ``reserved``); ``stream`` is the stream index it serves; ``pool`` the private
    pool it belongs to, 0 being none."""

    address: int
    total_size: int
    stream: int
    kind: str
    is_expandable: bool
    blocks: tuple[BlockView, ...]
    pool: int = 0


class Allocator(Protocol):
    """The interface the replay drives. All figures are bytes; streams are small indices, 0 being the default one.

    ``malloc`` returns an opaque handle for ``free`` and ``record_stream`` and raises
    :class:`graphmem.errors.DeviceOutOfMemory` when the limit is reached. A request of 0 bytes returns a handle that
    occupies nothing. An allocator that knows no streams and gives no memory back when it is asked to inherits the
    calls with a body.
    """

    name: str
    allocated_bytes: int
    reserved_bytes: int

    def malloc(self, size: int, stream: int = 0) -> Any: ...

    def free(self, handle: Any) -> None: ...

    def record_stream(self, handle: Any, stream: int) -> None:
        """Another stream uses a block. Nothing waits by default: a freed block is free at once."""
        return

    def synchronize(self) -> None:
        """All streams have done their work."""
        return

    def empty_cache(self) -> None:
        """Give back what is cached."""
        return

    def segments(self) -> tuple[SegmentView, ...]: ...


class Played(NamedTuple):
    """Events that an allocator played at once: its levels after each of them, and how often it gave back all it could.
    ``restore``, called once at most, makes the allocator as if it had played them itself, and gives the handles of the
    storages that live."""

    allocated: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    peak_allocated: int
    retries: int
    restore: Callable[[], dict[int, Any]]


@runtime_checkable
class ForwardingAllocator(Allocator, Protocol):
    """An allocator that may play many events at once, while it is new."""

    def fast_forward(
        self,
        kinds: npt.NDArray[np.int64],
        subjects: npt.NDArray[np.int64],
        sizes: Sequence[int] | npt.NDArray[np.int64],
        streams: Sequence[int] | npt.NDArray[np.int64],
    ) -> Played | None:
        """Play events as far as that goes; None where nothing is played. ``kinds`` (:data:`TAKE` to :data:`STOP`) and
        ``subjects`` (the index of a storage) are of each event, ``sizes`` (bytes) and ``streams`` of each storage."""


@runtime_checkable
class PoolAllocator(Allocator, Protocol):
    """An allocator that has private pools, each named by a number from 1 on. Others serve everything from one heap.

    ``private_reserved_at_peak``: bytes of each pool's segments when reserved bytes were at their peak.
    """

    private_reserved_at_peak: dict[int, int]

    def malloc_in_pool(self, size: int, stream: int, pool: int) -> Any: ...

    def declare_pool(self, pool: int, *, use_on_oom: bool, no_split: bool) -> None: ...

    def create_or_incref_pool(self, pool: int) -> None: ...

    def begin_allocate_to_pool(self, pool: int) -> None: ...

    def end_allocate_to_pool(self, pool: int) -> None: ...

    def release_pool(self, pool: int) -> None: ...

    def empty_pool(self, pool: int) -> None: ...

    def enter_capture(self) -> None: ...

    def leave_capture(self) -> None: ...


@runtime_checkable
class WaitingAllocator(Allocator, Protocol):
    """An allocator whose freed blocks wait for the streams that used them."""

    def wait_for(self, stream: int, later: int) -> None:
        """One stream has done its work, but for that behind which ``later`` blocks that it used were given back."""


@runtime_checkable
class LimitedAllocator(Allocator, Protocol):
    """An allocator whose limit a program may meet and set while it runs."""

    def refuse(self, size: int, stream: int, pool: int) -> None:
        """A request that was out of memory when the run was recorded, with all that is tried before giving up."""

    def limit_to_fraction(self, fraction: float) -> None:
        """No more than this part of the card's memory may be reserved; nothing where there is no card."""


@runtime_checkable
class ConfigurableAllocator(Allocator, Protocol):
    """An allocator whose settings a program may change while it runs."""

    def change_settings(self, text: str) -> None:
        """Follow these settings from now on, and no others; those it has left out are as by default."""
