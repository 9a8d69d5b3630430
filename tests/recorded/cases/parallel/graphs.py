"""CUDA graphs and memory pools, recorded on the CUDA build one by one. See ``tests/recorded/cases/loops``.

The stub driver must know stream capture (``tests/oracles/stub_cuda``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.recorded.cases.loops.networks import Transformer, loss_of, tokens
from tests.recorded.cases.loops.registry import Case
from tests.recorded.cases.parallel.streams import mlp

Loop = Iterator[Any]
CASES: dict[str, Case] = {}


def case(run: Callable[[], Loop]) -> Callable[[], Loop]:
    CASES[run.__name__] = Case(run.__name__, "graphs", run)
    return run


def rows(batch: int = 64, width: int = 256) -> Tensor:
    return torch.zeros(batch, width, device="cuda")


def warmed_up(run: Callable[[], Any], times: int = 3) -> None:
    """The warm-up that PyTorch's documentation asks for, on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(side)


@case
def inference() -> Loop:
    model, static = mlp().cuda().eval(), rows()
    with torch.no_grad():
        warmed_up(lambda: model(static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static)
        for _ in range(3):
            static.copy_(torch.zeros(64, 256))
            graph.replay()
            print_me = out.clone()
    yield graph, out, print_me


@case
def whole_step() -> Loop:
    model, static, target = mlp().cuda(), rows(), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(static), target).backward()
        optimizer.step()

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = nn.functional.mse_loss(model(static), target)
        loss.backward()
        optimizer.step()
    for _ in range(3):
        static.copy_(torch.zeros(64, 256))
        graph.replay()
    yield graph, loss


@case
def capturable_adam() -> Loop:
    model, (x, y) = Transformer().cuda(), tokens()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    yield graph, loss


@case
def eager_optimizer_after_replays() -> Loop:
    model, (x, y) = Transformer().cuda(), tokens()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), y).backward()

    warmed_up(step, 2)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = loss_of(model(x), y)
        loss.backward()
    for _ in range(2):
        graph.replay()
        optimizer.step()
    yield graph, loss


@case
def sizes_sharing_a_pool() -> Loop:
    """One graph for every batch size, the largest first, as servers of language models do."""
    model = mlp(512).cuda().eval()
    pool = torch.cuda.graph_pool_handle()
    graphs, outputs = [], []
    with torch.no_grad():
        warmed_up(lambda: model(rows(256, 512)), 1)
        for batch in (256, 128, 64, 32, 8):
            graph = torch.cuda.CUDAGraph()
            x = rows(batch, 512)
            with torch.cuda.graph(graph, pool=pool):
                outputs.append(model(x))
            graphs.append(graph)
        for graph in graphs:
            graph.replay()
    yield graphs, outputs


@case
def sizes_with_pools_of_their_own() -> Loop:
    model = mlp(512).cuda().eval()
    graphs, outputs = [], []
    with torch.no_grad():
        for batch in (8, 64, 256):
            graph = torch.cuda.CUDAGraph()
            x = rows(batch, 512)
            with torch.cuda.graph(graph):
                outputs.append(model(x))
            graphs.append(graph)
    yield graphs, outputs


@case
def dropped_and_captured_again() -> Loop:
    model, static = mlp().cuda(), rows()
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            out = model(static)
        graph.replay()
        del out
        graph.reset()
        torch.cuda.empty_cache()
    with torch.cuda.graph(graph), torch.no_grad():
        out = model(static)
    del graph
    model(static)
    del out
    torch.cuda.empty_cache()
    yield


@case
def outputs_outlive_the_graph() -> Loop:
    model, static = mlp().cuda(), rows()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        hidden = model[0](static)
        out = model[2](model[1](hidden))
    del graph, hidden
    torch.cuda.empty_cache()
    held = model(static)
    yield out, held


@case
def random_numbers() -> Loop:
    static = rows(512)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = nn.functional.dropout(static, 0.5)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    torch.rand(1000, device="cuda")
    graphs[0].reset()
    yield graphs, out


@case
def on_a_stream_with_a_workspace() -> Loop:
    side, static = torch.cuda.Stream(), rows()
    model = mlp().cuda()
    with torch.no_grad():
        with torch.cuda.stream(side):
            model(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = model(static)
        with torch.cuda.stream(side):
            again = model(static)
        del graph
        with torch.cuda.stream(side):
            last = model(static)
    yield out, again, last


@case
def forked_and_joined() -> Loop:
    first, second, static = mlp().cuda(), mlp().cuda(), rows(2048)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        a = first(static)
        with torch.cuda.stream(side):
            b = second(static)
        torch.cuda.current_stream().wait_stream(side)
        b.record_stream(torch.cuda.current_stream())
        out = a + b
        del a, b
        more = torch.zeros_like(out)
    graph.replay()
    later = torch.zeros_like(static)
    yield graph, out, more, later


def graphed(model: nn.Module, sample: Tensor, iterations: int = 3) -> Iterator[Any]:
    optimizer = torch.optim.AdamW(model.parameters())
    fast = torch.cuda.make_graphed_callables(model, (sample,))
    for _ in range(iterations):
        x = torch.zeros_like(sample)
        loss = fast(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield fast, loss


@case
def graphed_module() -> Loop:
    yield from graphed(mlp(512).cuda(), rows(128, 512))


@case
def graphed_module_with_input_gradients() -> Loop:
    yield from graphed(mlp(512).cuda(), rows(128, 512).requires_grad_())


@case
def graphed_with_dropout() -> Loop:
    yield from graphed(nn.Sequential(mlp(), nn.Dropout(0.1), mlp()).cuda(), rows(512))


@case
def graphed_parts() -> Loop:
    """Two parts of a network in graphs, and an eager one between them."""
    first, middle, last = mlp().cuda(), nn.Linear(256, 256).cuda(), mlp().cuda()
    parameters = [*first.parameters(), *middle.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x, h = rows(), rows().requires_grad_()
    fast_first, fast_last = torch.cuda.make_graphed_callables((first, last), ((x,), (h,)))
    for _ in range(2):
        loss = fast_last(middle(fast_first(x))).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    yield fast_first, fast_last, loss


@case
def pool_of_ones_own() -> Loop:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
        b = torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
    del b
    c = torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(pool):
        d = torch.zeros(29 << 20, dtype=torch.uint8, device="cuda")
    del a, d
    torch.cuda.empty_cache()
    del pool
    torch.cuda.empty_cache()
    yield c


@case
def training_in_a_pool() -> Loop:
    """The backward pass runs on another thread, outside the pool."""
    model, x = mlp(512).cuda(), rows(128, 512)
    pool = torch.cuda.MemPool()
    for _ in range(2):
        with torch.cuda.use_mem_pool(pool):
            loss = model(x).square().mean()
            loss.backward()
        model.zero_grad()
    del loss
    yield pool


@case
def nested_pools() -> Loop:
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool(no_split=True)
    kept = []
    with torch.cuda.use_mem_pool(outer):
        kept.append(rows(1000))
        with torch.cuda.use_mem_pool(inner):
            kept.append(rows(3000))
            kept.append(rows(10))
        kept.append(rows(2000))
    kept.append(rows(4000))
    del inner
    yield kept, outer


@case
def graph_in_a_pool_of_ones_own() -> Loop:
    pool, static = torch.cuda.MemPool(), rows(1000)
    with torch.cuda.use_mem_pool(pool):
        scratch = torch.zeros_like(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        out = static * 2 + 1
    del scratch
    graph.replay()
    del graph
    yield out, pool
