"""The arenas that ONNX Runtime's sessions take their memory from, and what they reserve beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphmem.allocators.base import Allocator, SegmentView
from graphmem.allocators.bfc import DRIVER_ALIGNMENT_BYTES, BumpDriver
from graphmem.allocators.onnxruntime_arena import BFCArena, StreamAwareBFCArena
from graphmem.runtimes.onnxruntime.options import Options, parse_options
from graphmem.runtimes.onnxruntime.plan.runs import LOAD
from graphmem.trace import Category, EventKind, Place, Trace


def reserved_allocations(trace: Trace, options: Options) -> frozenset[int]:
    """Which device allocations of ``trace``, counted from 0 and without empty ones, are made with ``Reserve``.

    They are what kernels reserve, and the initializers, with prepacked weights on the CPU, where the session reserves
    them at all.
    """
    kinds = {Category.HELD, *([Category.PARAMETER] if options.session.reserves_initializers else [])}
    births = trace.subjects[trace.kinds == EventKind.ALLOC].tolist()
    storages = [trace.storages[subject] for subject in births]
    held = [storage for storage in storages if storage.place == Place.DEVICE and storage.bytes > 0]
    return frozenset(index for index, storage in enumerate(held) if storage.category in kinds)


def session_count(trace: Trace) -> int:
    """How many sessions a planned trace holds; 1 for a trace of something else, whatever its streams are."""
    loads = sum(phase.iteration == 0 and phase.name.endswith(LOAD) for phase in trace.phases)
    return max(1, loads)


class OnnxRuntimeSessions(Allocator):
    """The arenas of several sessions on one device, one each; a storage's stream is the number of its session.

    A handle is (session, address). ``reserved`` are the numbers of the allocations that are made outside every region.
    """

    name = "onnxruntime-arena"

    def __init__(self, arenas: Sequence[BFCArena], reserved: frozenset[int]) -> None:
        self.arenas = tuple(arenas)
        self._reserved = reserved
        self._count = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0

    def malloc(self, size: int, stream: int = 0) -> tuple[int, int] | None:
        """Reserve or allocate in the arena of session ``stream``, of the only one if there is one. Raises
        :class:`~graphmem.errors.DeviceOutOfMemory`."""
        if not size:
            return None
        number, self._count = self._count, self._count + 1
        stream = min(stream, len(self.arenas) - 1)
        arena = self.arenas[stream]
        address = arena.reserve(size) if number in self._reserved else arena.malloc(size)
        self._sum_up()
        return None if address is None else (stream, address)

    def free(self, handle: tuple[int, int] | None) -> None:
        """Give a chunk or a reserved block back to its arena."""
        if handle is not None:
            self.arenas[handle[0]].free(handle[1])
            self._sum_up()

    def _sum_up(self) -> None:
        self.allocated_bytes = sum([arena.allocated_bytes for arena in self.arenas])
        self.reserved_bytes = sum([arena.reserved_bytes for arena in self.arenas])

    def synchronize(self) -> None:
        """The end of a run, for the arenas that tag chunks with streams."""
        for arena in self.arenas:
            arena.synchronize()

    def empty_cache(self) -> None:
        """Shrink every arena."""
        for arena in self.arenas:
            arena.empty_cache()
        self._sum_up()

    def segments(self) -> tuple[SegmentView, ...]:
        """The regions and reserved blocks of all sessions, by address."""
        views = [view for arena in self.arenas for view in arena.segments()]
        return tuple(sorted(views, key=lambda view: view.address))

    def stats(self, session: int = 0) -> dict[str, int]:
        """``GetStats`` of one session's arena."""
        return self.arenas[session].stats()


class HostDriver(BumpDriver):
    """Host memory as Linux gives large ranges: each new one below those before (``mmap`` searches top-down).

    Only the order matters: of equal chunks the arena takes the lowest.
    """

    _TOP = 1 << 62

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._below: dict[int, int] = {}

    def alloc(self, size: int) -> int | None:
        """Address of a new range of ``size`` bytes, or None beyond the capacity."""
        address = super().alloc(size)
        if address is None:
            return None
        start = (self._TOP - address - size) // DRIVER_ALIGNMENT_BYTES * DRIVER_ALIGNMENT_BYTES
        self._below[start] = address
        return start

    def free(self, address: int) -> None:
        """Give a range back."""
        super().free(self._below.pop(address))


def default_allocator(
    options: str | Options = "",
    capacity: int | None = None,
    *,
    reserved: frozenset[int] = frozenset(),
    sessions: int = 1,
    driver_alloc: Callable[[int], int | None] | None = None,
    driver_free: Callable[[int], None] | None = None,
) -> OnnxRuntimeSessions:
    """Fresh arenas of ``sessions`` sessions on one device; one for all with ``session.use_env_allocators``.

    ``capacity`` is what the device can give, in bytes; ``reserved`` is :func:`reserved_allocations` of the trace to
    replay. Raises :class:`~graphmem.errors.UsageError`.
    """
    chosen = parse_options(options) if isinstance(options, str) else options
    if driver_alloc is None:
        driver = HostDriver(capacity) if chosen.session.provider == "cpu" else BumpDriver(capacity)
        driver_alloc, driver_free = driver.alloc, driver.free
    count = 1 if chosen.session.use_env_allocators else sessions
    kind = StreamAwareBFCArena if chosen.session.stream_aware else BFCArena
    arenas = [kind(chosen.arena, driver_alloc=driver_alloc, driver_free=driver_free) for _ in range(count)]
    return OnnxRuntimeSessions(arenas, reserved)
