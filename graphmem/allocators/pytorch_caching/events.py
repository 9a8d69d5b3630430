"""Blocks that were used on other streams: freed by the program, but not before those streams' events have completed.

``insert_events``, ``process_events`` and ``synchronize_and_free_events`` of ``c10/cuda/CUDACachingAllocator.cpp``. How
long an event takes is a question of time, which a simulation does not have; the driver model gives it as a number of
queries that find it not ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from graphmem.allocators.pytorch_caching.blocks import Block

#: Queries left of an event that only a synchronisation completes.
_NEVER = 2**62


class _Event:
    __slots__ = ("block", "queries_left")

    def __init__(self, block: Block, queries_left: int) -> None:
        self.block = block
        self.queries_left = queries_left


class EventQueues:
    """The outstanding events (``cuda_events``): a queue per stream, oldest first."""

    def __init__(self) -> None:
        self.streams: dict[int, deque[_Event]] = {}
        self._outstanding: dict[Block, int] = {}  # event_count

    def insert_events(self, block: Block, streams: set[int], lag: int | None) -> None:
        """Record one event on each of the streams; the block is done when all of them have completed."""
        self._outstanding[block] = len(streams)
        for stream in sorted(streams):
            self.streams.setdefault(stream, deque()).append(_Event(block, _NEVER if lag is None else lag))

    def poll(self) -> Iterator[Block]:
        """Query every stream's events up to the first that is not ready; yields the blocks that are done."""
        for stream in list(self.streams):
            queue = self.streams[stream]
            while queue:
                if queue[0].queries_left > 0:
                    queue[0].queries_left -= 1
                    break
                yield from self._completed(queue.popleft())
            if not queue:
                del self.streams[stream]

    def wait(self, private_pool: int = 0) -> Iterator[Block]:
        """Synchronise with every event, or with those of one private pool's blocks; yields the blocks that are done."""
        streams, self.streams = self.streams, {}
        for stream, queue in streams.items():
            for event in queue:
                if private_pool and event.block.free_set.pool.private_pool != private_pool:
                    self.streams.setdefault(stream, deque()).append(event)
                else:
                    yield from self._completed(event)

    def complete(self) -> None:
        """Let every outstanding event be ready at its next query."""
        for queue in self.streams.values():
            for event in queue:
                event.queries_left = 0

    def complete_on(self, stream: int, later: int) -> None:
        """Let the events of one stream be ready at their next query, but for the ``later`` last ones."""
        queue = self.streams.get(stream, deque[_Event]())
        for event in islice(queue, max(0, len(queue) - later)):
            event.queries_left = 0

    def _completed(self, event: _Event) -> Iterator[Block]:
        left = self._outstanding[event.block] - 1
        if left:
            self._outstanding[event.block] = left
        else:
            del self._outstanding[event.block]
            yield event.block
