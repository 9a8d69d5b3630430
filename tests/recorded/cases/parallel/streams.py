"""Training loops on more than one CUDA stream, recorded one by one as :mod:`tests.recorded.cases.loops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.recorded.cases.loops.networks import Transformer, convolutional, images, loss_of, tokens
from tests.recorded.cases.loops.registry import Case

ITERATIONS = 3
Loop = Iterator[None]
CASES: dict[str, Case] = {}


def case(run: Callable[[], Loop]) -> Callable[[], Loop]:
    CASES[run.__name__] = Case(run.__name__, "streams", run)
    return run


def mlp(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Prefetcher:
    """Copies the next batch on a stream of its own while the current one is used."""

    def __init__(self, batches: int, record: bool) -> None:
        self.left, self.record = batches, record
        self.stream = torch.cuda.Stream()
        self.fetch()

    def fetch(self) -> None:
        self.next: tuple[Tensor, Tensor] | None = None
        if self.left:
            self.left -= 1
            with torch.cuda.stream(self.stream):
                x, y = images("cpu")
                self.next = x.pin_memory().to("cuda", non_blocking=True).float(), y.to("cuda", non_blocking=True)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            x, y = self.next
            if self.record:
                x.record_stream(torch.cuda.current_stream())
                y.record_stream(torch.cuda.current_stream())
            self.fetch()
            yield x, y


def prefetched(record: bool) -> Loop:
    model = convolutional().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in Prefetcher(5, record):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case
def prefetcher() -> Loop:
    yield from prefetched(True)


@case
def prefetcher_without_record() -> Loop:
    yield from prefetched(False)


@case
def whole_step_on_a_side_stream() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(ITERATIONS):
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    yield


@case
def forward_on_a_side_stream() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    stream = torch.cuda.Stream()
    for _ in range(ITERATIONS):
        with torch.cuda.stream(stream):
            loss = loss_of(model(x), y)
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


class TwoBranches(nn.Module):
    """The halves run on two streams of their own, or one of them on the caller's."""

    def __init__(self, first: bool = True, record: bool = True) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = mlp(), mlp(), mlp(), nn.Linear(256, 10)
        self.streams = [torch.cuda.Stream() if first else None, torch.cuda.Stream(priority=-1)]
        self.record = record

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        main = torch.cuda.current_stream()
        outputs = []
        for branch, stream in zip((self.left, self.right), self.streams, strict=True):
            if stream is not None:
                stream.wait_stream(main)
                if self.record:
                    x.record_stream(stream)
            with torch.cuda.stream(stream):
                outputs.append(branch(x))
        for output, stream in zip(outputs, self.streams, strict=True):
            if stream is not None:
                main.wait_stream(stream)
                if self.record:
                    output.record_stream(main)
        return self.head(outputs[0] + outputs[1])


def branches(first: bool, record: bool, batch: int = 64) -> Loop:
    model = TwoBranches(first, record).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.zeros(batch, 256, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case
def two_branches() -> Loop:
    yield from branches(True, True)


@case
def two_branches_large() -> Loop:
    yield from branches(True, True, 4096)


@case
def two_branches_without_record() -> Loop:
    yield from branches(True, False)


@case
def one_branch_aside() -> Loop:
    yield from branches(False, True)


@case
def accumulated_on_two_streams() -> Loop:
    """Every parameter gets gradients from both streams."""
    model = mlp().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.zeros(64, 256, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(ITERATIONS):
        stream.wait_stream(torch.cuda.current_stream())
        first = model(x)
        with torch.cuda.stream(stream):
            second = model(x)
        torch.cuda.current_stream().wait_stream(stream)
        (first.sum() + second.sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    yield


@case
def gradients_added_across_streams() -> Loop:
    """The stream of the node that uses the sum is where the engine adds."""
    main, first, second = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(300_000, device="cuda", requires_grad=True)
    for consumer, producers in (
        (main, (first, second)),
        (first, (main, second)),
        (first, (second, first, main)),
        (second, (second, second)),
    ):
        with torch.cuda.stream(consumer):
            h = x * 2
        outputs = []
        for producer in producers:
            with torch.cuda.stream(producer):
                outputs += [h.sum(), (h * 3).sum()]
        torch.autograd.backward(outputs)
    yield


class Aside(torch.autograd.Function):
    """Keeps its input on the host, copied on a side stream both ways: what an offloading library does."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stream: torch.cuda.Stream) -> Tensor:  # type: ignore[no-untyped-def]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ctx.kept = x.to("cpu", non_blocking=True)
            x.record_stream(stream)
        ctx.stream = stream
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        with torch.cuda.stream(ctx.stream):
            x = ctx.kept.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(ctx.stream)
        x.record_stream(torch.cuda.current_stream())
        return grad @ weight.T, x.T @ grad, None


@case
def offloaded_on_a_side_stream() -> Loop:
    weights = [torch.zeros(256, 256, device="cuda", requires_grad=True) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, 0.1)
    stream = torch.cuda.Stream()
    for _ in range(ITERATIONS):
        x = torch.zeros(512, 256, device="cuda")
        for weight in weights:
            x = torch.relu(Aside.apply(x, weight, stream))
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case
def checkpointed_on_a_side_stream() -> Loop:
    model = nn.ModuleList(mlp() for _ in range(3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(64, 256, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(ITERATIONS):
        with torch.cuda.stream(stream):
            y = x
            for block in model:
                y = checkpoint(block, y, use_reentrant=False)
        torch.cuda.current_stream().wait_stream(stream)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case
def streams_of_the_pool_return() -> Loop:
    """The 33rd stream is the first one again."""
    kept = []
    for _ in range(34):
        with torch.cuda.stream(torch.cuda.Stream()):
            kept.append(torch.empty(300_000, device="cuda"))
            del kept[-1]
            kept.append(torch.empty(200_000, device="cuda"))
    yield


@case
def generic_streams() -> Loop:
    """``torch.Stream`` as a context, and ``set_stream``."""
    stream, before = torch.Stream(device="cuda"), torch.cuda.current_stream()
    with stream:
        x = torch.empty(1_000_000, device="cuda")
    torch.cuda.set_stream(torch.cuda.Stream())
    y = torch.empty(1_000_000, device="cuda")
    torch.cuda.set_stream(before)
    x.record_stream(before)
    del x
    z = torch.empty(1_000_000, device="cuda")
    del y, z
    yield
