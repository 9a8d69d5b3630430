"""Rooms below the recorder are handed books: a toy book is enough to try one out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphmem.capture.device.cuda_graphs import patch_cuda_graphs
from graphmem.capture.device.streams_api import patch_streams
from graphmem.capture.patches import Patches


class _Streams:
    """Every new stream is another one."""

    def __init__(self) -> None:
        self.current = 0
        self.made = 0

    def make_current(self, index: int) -> None:
        self.current = index

    def next_of_pool(self, priority: int) -> int:
        self.made += 1
        return self.made

    def note_leaves(self, leaves: Iterable[torch.Tensor]) -> None: ...


class _Pools:
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.card = SimpleNamespace(torch_version=(2, 13))

    def captured(self, stream: int) -> Any:
        return None

    def new_id(self, *, is_user_created: bool = True) -> tuple[int, int]:
        return (0, 1) if is_user_created else (1, 0)

    def begin(self, pool: Any, label: str, *, streams: set[int] | None, any_thread: bool = False) -> None:
        self.asked.append(("begin", pool, streams))

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **_: Any) -> int:
            self.asked.append((name, *arguments))
            return len(self.asked)

        return note


@pytest.fixture
def books() -> Iterator[tuple[_Streams, _Pools]]:
    """Streams and pools that ``torch.cuda`` acts on."""
    made: tuple[Any, Any] = _Streams(), _Pools()
    (streams, pools), patches = made, Patches()
    try:
        patch_streams(patches, streams, pools, pools)
        patch_cuda_graphs(patches, streams, pools, pools)
        yield streams, pools
    finally:
        patches.undo()


def test_streams_act_on_their_book(books: tuple[_Streams, _Pools]) -> None:
    streams, _ = books
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert streams.current == side.stream_id == 1
        assert torch.cuda.current_stream() == side
    assert streams.current == 0
    assert torch.cuda.default_stream() != side


def test_a_graph_of_newer_versions_has_no_state_while_nothing_is_drawn(books: tuple[_Streams, _Pools]) -> None:
    streams, pools = books
    pools.card.torch_version = (2, 14)
    streams.make_current(3)
    torch.cuda.CUDAGraph().capture_begin()
    assert [what for what, *_ in pools.asked] == ["begin"]


def test_a_graph_takes_its_state_and_a_pool_from_its_book(books: tuple[_Streams, _Pools]) -> None:
    streams, pools = books
    graph = torch.cuda.CUDAGraph()
    streams.make_current(3)
    graph.capture_begin()
    graph.capture_end()
    assert [what for what, *_ in pools.asked] == ["take", "take", "begin", "end"]
    assert pools.asked[2] == ("begin", (1, 0), {3})
    graph.reset()
    assert [what for what, *_ in pools.asked[4:]] == ["give", "give", "clear_workspaces", "release"]
    streams.make_current(0)
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
