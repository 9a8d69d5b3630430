"""CUDA graphs and memory pools: allocations go to the pools that the CUDA build takes them from, and stay there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import graphmem  # noqa: E402
from graphmem.allocators.ideal import IdealAllocator  # noqa: E402
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from graphmem.estimate import PoolUse  # noqa: E402
from graphmem.replay import replay  # noqa: E402
from graphmem.trace import Category, EventKind, from_json, to_json  # noqa: E402
from graphmem.units import MIB  # noqa: E402
from tests.recorded.parallel import CASES, load, predict  # noqa: E402
from tests.support.captures import births, record  # noqa: E402

RECORDED = load()
GRAPHS = [name for name, case in CASES.items() if case.group == "graphs"]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_recorded_loop_is_predicted_with_its_pools(name: str) -> None:
    ours, recorded = predict(CASES[name]), RECORDED[name]
    assert ours.events == recorded.events, f"python -m tests.recorded parallel differ {name}"
    assert (ours.reserved_bytes, ours.late_bytes) == (recorded.reserved_bytes, recorded.late_bytes)


def _doubled_in_a_graph() -> None:
    x = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        del y
        z = x * 3
    graph.replay()
    del z


def test_what_a_graph_allocates_lies_in_its_pool_and_is_reused_there() -> None:
    trace = record(_doubled_in_a_graph)
    inside = [storage for storage in trace.storages if storage.pool]
    assert [(storage.bytes, storage.pool) for storage in inside] == [(3 * MIB, 1), (3 * MIB, 1)]
    assert [pool.label for pool in trace.pools] == ["pool of CUDA graphs"]
    held = {segment.pool: segment.total_size for segment in replay(trace, PyTorchCachingAllocator()).segments}
    assert held[1] == 20 * MIB


def test_a_trace_with_pools_survives_being_written() -> None:
    trace = record(_doubled_in_a_graph)
    copy = from_json(to_json(trace))
    assert (copy.pools, copy.storages) == (trace.pools, trace.storages)
    assert copy.kinds.tolist() == trace.kinds.tolist()


def test_other_allocators_serve_a_pool_from_their_one_heap() -> None:
    trace = record(_doubled_in_a_graph)
    assert replay(trace, IdealAllocator()).peak_reserved_bytes == 6 * MIB + 16


def test_the_estimate_says_what_private_pools_hold() -> None:
    """A graph's pool holds a segment of 20 MiB, of which its one live tensor uses 3 MiB."""
    estimate = graphmem.replay_trace(record(_doubled_in_a_graph))
    assert estimate.pools == (PoolUse("pool of CUDA graphs", 1, 20 * MIB, 3 * MIB),)
    assert estimate.to_dict()["pools"][0]["reserved_bytes"] == 20 * MIB
    assert "pool of CUDA graphs" in estimate.report(details=True)


def test_a_captured_stream_is_known_as_such() -> None:
    def step() -> None:
        side = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        assert not torch.cuda.is_current_stream_capturing()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            assert torch.cuda.current_stream().is_capturing()
            assert not side.is_capturing()
            side.wait_stream(torch.cuda.current_stream())
            assert side.is_capturing()
        assert not torch.cuda.is_current_stream_capturing()
        assert not side.is_capturing()

    kinds = [event.kind for event in record(step).events()]
    assert kinds.count(EventKind.ENTER_CAPTURE) == kinds.count(EventKind.LEAVE_CAPTURE) == 1


def test_pools_are_counted_and_named_as_in_pytorch() -> None:
    def step() -> None:
        pool = torch.cuda.MemPool()
        assert (pool.id, pool.use_count(), pool.snapshot()) == ((0, 1), 1, [])
        assert torch.cuda.graph_pool_handle() == (0, 2)
        with torch.cuda.use_mem_pool(pool):
            assert pool.use_count() == 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id):
            pass
        assert graph.pool() == pool.id
        assert pool.use_count() == 2
        graph.reset()
        assert pool.use_count() == 1

    trace = record(step)
    assert len(trace.pools) == 1


def test_clearing_the_workspaces_lets_the_next_product_take_one() -> None:
    def step() -> None:
        x = torch.zeros(64, 64, device="cuda")
        x @ x
        torch._C._cuda_clearCublasWorkspaces()
        x @ x

    trace = record(step)
    assert [birth.category for birth in births(trace)].count(Category.WORKSPACE) == 2


def _nested_twice() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool), torch.cuda.use_mem_pool(pool):
        pass


def _captured_twice() -> None:
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        with torch.cuda.graph(graph):
            pass


def _dropped_inside() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pool.__del__()


def _synchronized_inside() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()


def _read_inside() -> None:
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: torch.cuda.CUDAGraph().capture_begin(), "non-default stream"),
        (lambda: torch.cuda.CUDAGraph().replay(), "without a preceding successful capture"),
        (lambda: torch.cuda.CUDAGraph().pool(), "without a preceding successful capture"),
        (lambda: torch.cuda.CUDAGraph().capture_end(), "without capture_begin"),
        (lambda: torch.cuda.MemPool(object()), "an allocator of its own"),
        (_nested_twice, "already recording"),
        (_captured_twice, "already owns a captured graph"),
        (_dropped_inside, "keep it until the capture has ended"),
        (_synchronized_inside, "synchronized while a CUDA graph is captured"),
        (_read_inside, "read back while a CUDA graph is captured"),
    ],
)
def test_what_pytorch_refuses_is_refused(step: Callable[[], None], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        record(step)


def test_pytorchs_own_functions_are_back_afterwards() -> None:
    before = torch.cuda.CUDAGraph, torch.cuda.MemPool, torch.cuda.graph_pool_handle, torch.Tensor.data_ptr
    record(_doubled_in_a_graph)
    assert before == (
        torch.cuda.CUDAGraph,
        torch.cuda.MemPool,
        torch.cuda.graph_pool_handle,
        torch.Tensor.data_ptr,
    )
    assert torch.cuda.graph.default_capture_stream is None
