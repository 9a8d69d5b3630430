"""CUDA graphs as the engine finds out before there is a KV cache what they will take.

Followed from vllm 0.32.0, ``v1/worker/gpu/cudagraph_utils.py`` (``profile_cudagraph_memory``) and
``v1/worker/gpu/model_runner.py`` (``capture_model``): a KV cache of a block for each sequence, every piecewise graph,
the two largest whole ones; the card's loss of free memory, that of two whole graphs replaced by ``first + (count - 1) *
max(second, 1 MiB)``.

Each of those two is measured from before ``torch.cuda.graph`` empties the allocator's cache, which still holds the
memory of the warm-up before it: the samples are negative, and taking them away adds the warm-up's cache to the
estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from graphmem.serving.vllm.attention import FlashAttention2
from graphmem.serving.vllm.layers import cdiv
from graphmem.serving.vllm.models.base import Family
from graphmem.serving.vllm.run import CAPTURE_STREAM, Batch, Run, Tensor
from graphmem.trace import Category, EventKind
from graphmem.units import MIB

#: ``_FULL_GRAPH_PROFILING_SAMPLES`` and ``_MIN_PER_GRAPH_BYTES`` (cudagraph_utils.py).
SAMPLES = 2
LEAST_GRAPH_BYTES = MIB
#: A captured graph's random state: seed and offset, 8 bytes each (CUDAGeneratorImpl.cpp).
_GRAPH_STATE = (8, 8)


@dataclass(frozen=True)
class Marks:
    """Events after which the engine asks for free memory: around the whole, around sampled piecewise graphs (the first
    model runner's), and around sampled whole graphs; with the number of graphs of either kind."""

    start: int
    end: int
    pieces: tuple[tuple[int, int], ...]
    samples: tuple[tuple[int, int], ...]
    piecewise_graphs: int
    whole_graphs: int
    first_runner: bool = False


def estimate(marks: Marks, reserved: Sequence[int]) -> int:
    """The engine's estimate, from bytes reserved after every event."""

    def taken(spans: tuple[tuple[int, int], ...]) -> list[int]:
        return [int(reserved[after] - reserved[before]) for before, after in spans]

    def rest(samples: list[int], graphs: int) -> int:
        return (graphs - 1) * (max(samples[1], LEAST_GRAPH_BYTES) if len(samples) > 1 else 0)

    samples = taken(marks.samples)
    if marks.first_runner:
        found = ((taken(marks.pieces), marks.piecewise_graphs), (samples, marks.whole_graphs))
        kinds = [(kind, graphs) for kind, graphs in found if kind]
        return max(kind[0] for kind, _ in kinds) + sum(rest(kind, graphs) for kind, graphs in kinds)
    measured = int(reserved[marks.end] - reserved[marks.start])
    whole = samples[0] + rest(samples, marks.whole_graphs) if samples else 0
    return max(measured - sum(samples) + whole, 0)


@dataclass(frozen=True)
class Kinds:
    """Which graphs are captured (``cudagraph_mode``), and for which batches: ``drafted`` tokens of a request beside its
    own, so many ``cases`` of every size (with adapters and without), and the filler of adapter slots with dummies."""

    mode: str = "FULL_AND_PIECEWISE"
    drafted: int = 0
    cases: int = 1
    fill: Callable[[], None] = lambda: None

    @property
    def pieces(self) -> bool:
        """True if batches of any kind are captured piece by piece."""
        return self.mode in ("PIECEWISE", "FULL_AND_PIECEWISE")

    def whole(self, sizes: Sequence[int], requests: int) -> list[int]:
        """Batches that are captured whole, largest first: those that only decode, of as many tokens for each request
        (``_init_candidates``); all of them where nothing is captured in pieces."""
        if self.mode == "PIECEWISE":
            return []
        if self.mode == "FULL":
            chosen = sorted(sizes, reverse=True)
        else:
            each = self.drafted + 1
            rounded = {cdiv(size, each) * each for size in sizes}
            chosen = sorted((one for one in rounded if one <= min(requests * each, max(sizes))), reverse=True)
        return [size for size in chosen for _ in range(self.cases)]


class GraphProfile:
    """The capture of all graphs, written down."""

    def __init__(
        self, run: Run, model: Family, batch: Batch, backend: FlashAttention2, layers: int, kinds: Kinds
    ) -> None:
        self.run, self.model, self.batch, self.backend, self.layers = run, model, batch, backend, layers
        self.kinds = kinds
        self._pool = run.builder.pool("CUDA graphs")
        self._states: list[Tensor] = []
        self._schedule: list[Tensor] = []

    def record(self, sizes: list[int], block_bytes: int, tables: list[int], *, first_runner: bool) -> Marks:
        """``sizes`` are of batches in tokens, ``tables`` the bytes of each KV cache group's block table. The second
        model runner captures all piecewise graphs and two whole ones, whose warm-ups are before their samples; the
        first one (v1/worker/gpu_model_runner.py) the two largest graphs of either kind, each measured from before its
        warm-up."""
        run = self.run
        whole = self.kinds.whole(sizes, self.batch.requests)
        sizes = sorted(sizes * self.kinds.cases, reverse=True)
        kept = self._minimal_cache(sizes[0], block_bytes, tables)
        start = self._begin()
        self.kinds.fill()
        pieces, samples, hidden = [], [], list[Tensor]()
        captured = (sizes[:SAMPLES] if first_runner else sizes) if self.kinds.pieces else []
        with run.placed(CAPTURE_STREAM):
            for size in captured:
                before = run.last
                followed = None if first_runner or size == sizes[0] else self.model.followed_layers
                self._warm_up(size, followed, hidden, keeps=not first_runner)
                self._piecewise(size, followed)
                pieces.append((before, run.last))
            for size in whole[:SAMPLES]:
                before = run.last
                self._warm_up(size, None, hidden, keeps=not first_runner)
                if not first_runner:
                    self._dummy(size)
                    before = run.last
                self._begin_graph()
                self.model.send(self._forward(size, self._pool))
                samples.append((before, run.last))
        end = run.last
        self._end([*kept, *hidden])
        count = len(sizes) if self.kinds.pieces else 0
        spans = tuple(pieces) if first_runner else ()
        return Marks(start, end, spans, tuple(samples), count, len(whole), first_runner)

    def _warm_up(self, size: int, layers: int | None, hidden: list[Tensor], *, keeps: bool) -> None:
        """A step outside of graphs; ``hidden`` has the static hidden states of the first one where the runner
        ``keeps`` them."""
        self._dummy(size)
        result = self._forward(size, 0, layers)
        if keeps and not hidden:
            for _ in range(self.model.hands_on):
                hidden.append(self.run.new(result.bytes, "static hidden states", Category.WORKSPACE))
        self.model.send(result)

    def _minimal_cache(self, largest: int, block_bytes: int, tables: list[int]) -> list[Tensor]:
        """A KV cache of a block for each sequence, with its tables and the attention's buffers."""
        run = self.run
        run.empty_cache()
        run.enter("minimal KV cache")
        kept = [run.new(size, "attention metadata") for size in self.backend.metadata(self.batch)]
        for table in tables:
            kept += [run.new(table, "block table"), run.new(table, "block table")]
            kept.append(run.new(self.batch.tokens * 8, "slots"))
        kept += [run.new(size, "block tables") for size in (8, 8, 4, 1, 8)]
        kept.append(run.new(max(1, min(self.batch.requests, largest)) * block_bytes, "minimal KV cache"))
        return kept

    def _begin(self) -> int:
        self.run.empty_cache()
        start = self.run.last
        self.run.builder.event(EventKind.CREATE_POOL, 0, self._pool)
        return start

    def _end(self, kept: list[Tensor]) -> None:
        self.run.free(*self._states, *self._schedule, *kept)
        self.run.builder.event(EventKind.RELEASE_POOL, 0, self._pool)
        self.run.empty_cache()

    def _dummy(self, size: int) -> None:
        """The batch and the attention's metadata, which are copied into static buffers."""
        requests = min(size, self.batch.requests)
        made = [self.run.new(one) for one in (requests * 8, requests * 4, requests * 4, (requests + 1) * 4)]
        scheduled = [self.run.new(one) for one in self.backend.scheduled(requests)]
        self.run.free(*made)
        if self.backend.keeps_schedule:
            self._schedule, scheduled = scheduled, self._schedule
        self.run.free(*scheduled)

    def _begin_graph(self) -> None:
        """``torch.cuda.graph.__enter__``: the cache is emptied, and the graph gets a random state."""
        self.run.empty_cache()
        with self.run.placed(0):
            self._states += [self.run.new(size, "graph state") for size in _GRAPH_STATE]

    def _forward(self, size: int, pool: int, layers: int | None = None) -> Tensor:
        with self.run.placed(CAPTURE_STREAM, pool):
            return self.model.compiled(size, self._attend, plainly, layers)

    def _attend(self, tokens: int) -> None:
        self.backend.call(self.run, tokens)

    def _piecewise(self, size: int, layers: int | None) -> None:
        """Every piece is a graph in the pool; attention runs outside of it."""
        followed = self.layers if layers is None else min(layers, self.layers)

        @contextmanager
        def piece() -> Iterator[None]:
            self._begin_graph()
            with self.run.placed(CAPTURE_STREAM, self._pool):
                yield

        self.model.send(self.model.compiled(size, self._attend, piece, followed))
        with self.run.placed(0):
            for _ in range(self.layers - followed):
                self._states += [self.run.new(one, "graph state") for one in _GRAPH_STATE]


@contextmanager
def plainly() -> Iterator[None]:
    """A piece that is no graph."""
    yield


def block_table_bytes(batch: Batch, block_size: int) -> int:
    """A row for each request, padded to 128 tokens (v1/worker/block_table.py, ``get_block_table_width``)."""
    step = max(1, 128 // block_size)
    return batch.requests * cdiv(cdiv(batch.length, block_size), step) * step * 4
