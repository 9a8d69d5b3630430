"""CUDA streams and events as a script finds them: ``torch.cuda.Stream``, ``torch.cuda.Event`` and the functions beside.

Time does not exist in a capture: waiting and querying return at once, and when recorded work is done is left to the
allocator's model of events.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graphmem.capture.device.pretend_device import CUDA_MODULES, cards
from graphmem.capture.patches import Patches

if TYPE_CHECKING:
    from graphmem.capture.record.memory_pools import MemoryPools
    from graphmem.capture.record.storages import Storages
    from graphmem.capture.record.streams import Streams


class Event:
    """Stands for a CUDA event: recorded and done at once. A capture makes a subclass that knows its books."""

    streams: ClassVar[Streams]
    pools: ClassVar[MemoryPools]
    storages: ClassVar[Storages]
    joined: ClassVar[dict[int, dict[int, int]]]  # stream -> what it has waited for, as in an event
    device = property(lambda self: cards().own)
    cuda_event = event_id = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.capture: Any = None  # the capture of a CUDA graph that it was recorded in
        self._after: dict[int, int] = {}  # streams, and the row of the trace before which they are done once it is

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 1.0

    def synchronize(self) -> None:
        for stream, row in self._after.items():
            self.storages.waited(stream, row)

    def record(self, stream: Stream | None = None) -> None:
        index = self._index(stream)
        self._after = {**self.joined.get(index, {}), index: len(self.storages.builder.rows)}
        self.capture = self.pools.captured(index)

    def wait(self, stream: Stream | None = None) -> None:
        index = self._index(stream)
        joined = self.joined.setdefault(index, {})
        joined.update((other, row) for other, row in self._after.items() if row > joined.get(other, -1))
        self.pools.join(index, self.capture)

    def _index(self, stream: Stream | None) -> int:
        return self.streams.current if stream is None else int(stream.stream_id)


class Stream:
    """Stands for a CUDA stream, and for the context that makes it current. A capture makes a subclass that knows its
    books."""

    streams: ClassVar[Streams]
    pools: ClassVar[MemoryPools]
    event_class: ClassVar[type[Event]]
    device = property(lambda self: cards().own)
    device_index = property(lambda self: cards().own.index)
    device_type = 1

    def __init__(self, device: object = None, priority: int = 0, stream_id: int | None = None, **_: object) -> None:
        self.priority = priority
        self.stream_id = self.streams.next_of_pool(priority) if stream_id is None else stream_id
        self._before: list[int] = []

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    native_handle = cuda_stream

    def __enter__(self) -> Stream:
        self._before.append(self.streams.current)
        self.streams.make_current(self.stream_id)
        return self

    def __exit__(self, *_: object) -> None:
        self.streams.make_current(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.pools.captured(self.stream_id) is not None

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)


class StreamContext:
    """``torch.cuda.stream(s)``; None changes nothing. As PyTorch's it goes by ``torch.cuda.set_stream``, in whose place
    a program may have put a function of its own to know the stream (vLLM does)."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.src_prev_stream: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.src_prev_stream = torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self.src_prev_stream)


def patch_streams(patches: Patches, streams: Streams, pools: MemoryPools, storages: Storages) -> None:
    """Make the stream functions of ``torch`` and ``torch.cuda`` act on these books."""
    books = {"streams": streams, "pools": pools}
    event_class: Any = type("Event", (Event,), {**books, "storages": storages, "joined": {}})
    stream_class: Any = type("Stream", (Stream,), {**books, "event_class": event_class})

    def current_stream(*_: object, **__: object) -> Stream:
        return stream_class(stream_id=streams.current)  # type: ignore[no-any-return]

    def default_stream(*_: object, **__: object) -> Stream:
        return stream_class(stream_id=0)  # type: ignore[no-any-return]

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            streams.make_current(stream.stream_id)

    def record_stream(self: torch.Tensor, stream: Stream) -> None:
        storages.record_stream(self, stream.stream_id)

    names = {
        "Stream": stream_class,
        "ExternalStream": stream_class,
        "StreamContext": StreamContext,
        "Event": event_class,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "get_stream_from_external": default_stream,
        "set_stream": set_stream,
    }
    patches.where_found(CUDA_MODULES, names)
    patches.table(torch, {"Stream": stream_class, "Event": event_class})
    patches.set(torch.Tensor, "record_stream", record_stream)
    patches.table(torch.accelerator, {"current_stream": current_stream, "set_stream": set_stream})
    _patch_parallel(patches, stream_class)


def _patch_parallel(patches: Patches, stream_class: type[Stream]) -> None:
    """``nn.parallel`` copies on a stream of its own for each device."""
    side_stream: list[Stream] = []

    def get_stream(device: torch.device) -> Stream | None:
        """``torch.nn.parallel._functions._get_stream``, which keeps the streams that it made in a global."""
        if device.type == "cpu":
            return None
        if not side_stream:
            side_stream.append(stream_class(device))
        return side_stream[0]

    patches.set(sys.modules["torch.nn.parallel._functions"], "_get_stream", get_stream)
