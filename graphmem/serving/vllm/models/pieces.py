"""A decoder as torch.compile makes it: pieces between calls of attention, with the buffers that Inductor's
plan leaves (torch 2.13, _inductor/codegen/wrapper.py, ``AllocateLine.plan``, and _inductor/scheduler.py,
``decide_inplace_update``).

What stands between two products is one kernel: only what a product reads, or a later piece, is a buffer. A residual's
sum that the model's code makes itself is such a buffer, and lies where attention's projected output lay; where the
engine's norm sums (``fused_add_rms_norm``, in fp32), the sum that is handed on and the one that is normed are made
apart of both. Where products read eight bits the kernel before writes them, and the output of a product, which the
engine's operator is given, is asked for before its input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from graphmem.serving.vllm.layers import Linear
from graphmem.serving.vllm.models.base import Attend, Piece
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.sources.vllm_layers import ROTARY, Backend, Happening


class Residual(Enum):
    """The way of residuals through a layer: summed by the norms behind them; summed by the model's code, and normed
    before each part; normed behind each part; or around both parts, which read one norm."""

    BY_NORMS = "by norms"
    BEFORE = "before"
    BEHIND = "behind"
    PARALLEL = "parallel"


#: By how many norms there are between attention's output and the feed-forward layer, and behind that; and whether the
#: model's code sums right before the products.
_WAYS = {
    (1, 1, False): Residual.BEFORE,
    (1, 1, True): Residual.BEHIND,
    (0, 1, False): Residual.PARALLEL,
}


@dataclass(frozen=True)
class Layer:
    """The products of a layer: of queries, keys and values, of attention's output, and of the feed-forward layer, which
    is ``gated`` or not, or is ``experts``. ``quantises``: the activation writes what the last product reads, where that
    has a kernel for it."""

    into: Linear
    out: Linear
    fed: tuple[Linear, Linear] | None
    gated: bool = True
    quantises: bool = False
    experts: Callable[[int], Tensor] | None = None

    @property
    def up(self) -> Linear:
        """The first product of a feed-forward layer."""
        assert self.fed is not None
        return self.fed[0]

    @property
    def down(self) -> Linear:
        """Its second."""
        assert self.fed is not None
        return self.fed[1]


@dataclass(frozen=True)
class Plan:
    """A decoder that is followed in pieces. Sizes are bytes of one token; ``scales``: of the scale of an input in eight
    bits, None where products read what the model computes in. ``tables``: cosines and sines that are made for all
    layers at once; ``positions``: temporaries of a layer's. ``norms_behind``: parts are normed behind them too;
    ``head_norms``: heads of queries and keys are normed."""

    way: Residual
    layers: tuple[Layer, ...]
    hidden: int
    queries: int
    keys: int
    scales: int | None = None
    tables: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    norms_behind: bool = False
    head_norms: bool = False


def plan_of(backend: Backend, linears: dict[str, Linear], norms: Mapping[str, int], itemsize: int) -> Plan | None:
    """The plan of a decoder whose layers are alike: four products each, of one rank where not norms sum the residual.
    None for another."""
    segments = list(_segments(backend.forward))
    if len(segments) < 2 or backend.cached or backend.value_dim:
        return None
    known = [_layer(segment, linears, set(norms), sums=backend.sums_in_place) for segment in segments[1:]]
    firsts = [one.name for one in segments[0] if one.name in linears]
    ways = {one[0] for one in known[:-1] if one is not None}
    way = ways.pop() if len(ways) == 1 else None
    if len(firsts) != 1 or way is None or None in known:
        return None
    into = [linears[firsts[0]], *(one[2] for one in known[:-1] if one is not None and one[2] is not None)]
    parts = [one[1] for one in known if one is not None]
    if len(into) != len(parts):
        return None
    layers = tuple(Layer(first, out, fed, gated) for first, (out, fed, gated) in zip(into, parts, strict=True))
    hidden, heads = sum(layers[0].out.outputs) * itemsize, backend.heads * backend.head_dim * itemsize
    keys = backend.kv_heads * backend.head_dim * itemsize
    return Plan(
        way, layers, hidden, heads, keys, scales_of(layers), _tables(backend.forward),
        head_norms=backend.head_dim in norms.values(),
    )  # fmt: skip


def scales_of(layers: Sequence[Layer]) -> int | None:
    """Bytes of the scale of an input that products read in eight bits, where all of them do and alike; else None."""
    if any(one.fed is None for one in layers):
        return None
    linears = (linear for one in layers for linear in (one.into, one.out, one.up, one.down))
    scales = {linear.method.scales_of_rows() for linear in linears}
    return scales.pop() if len(scales) == 1 else None


def _tables(happenings: Sequence[Happening]) -> tuple[int, ...]:
    """Cosines and sines that are there when attention is called first."""
    alive: dict[int, int] = {}
    for one in happenings:
        if one.kind == "attended":
            break
        if one.kind == "new" and one.name == ROTARY:
            alive[one.storage] = one.token_bytes
        elif one.kind == "free":
            alive.pop(one.storage, None)
    return tuple(alive.values())


def _segments(happenings: Sequence[Happening]) -> Iterator[list[Happening]]:
    """The events between calls of attention."""
    found: list[Happening] = []
    for one in happenings:
        if one.kind == "attended":
            yield found
            found = []
        elif one.kind in ("new", "returned"):
            found.append(one)
    yield found


_Parts = tuple[Linear, tuple[Linear, Linear], bool]


def _layer(
    segment: list[Happening], linears: dict[str, Linear], norms: set[str], *, sums: bool
) -> tuple[Residual | None, _Parts, Linear | None] | None:
    """(the way of residuals, the products behind attention, that before the next attention) of a segment."""
    at = [place for place, one in enumerate(segment) if one.kind == "returned" and one.name in linears]
    if len(at) not in (3, 4) or (not sums and any(linears[segment[one].name].reduce for one in at)):
        return None
    own = [linears[segment[place].name] for place in at]
    out, up, down = own[:3]
    parts = (out, (up, down), sum(up.outputs) == 2 * down.inputs)
    if len(own) == 3:
        return None, parts, None
    between, behind = segment[at[0] + 1 : at[1]], segment[at[2] + 1 : at[3]]
    counts = [sum(one.name in norms and one.kind == "returned" for one in some) for some in (between, behind)]
    if sums:
        return (Residual.BY_NORMS if counts == [0, 0] else None), parts, own[3]
    is_summed = bool(between) and between[-1].kind == "new"
    return _WAYS.get((counts[0], counts[1], is_summed)), parts, own[3]


class Pieces:
    """The pieces of a plan, for so many tokens."""

    def __init__(self, run: Run, plan: Plan, tokens: int) -> None:
        self.run, self.plan, self.tokens = run, plan, tokens
        self.width = tokens * plan.hidden
        #: The residual that is for a pipeline's next stage.
        self.sent: Tensor | None = None

    def whole(self, attend: Attend, piece: Piece, layers: int | None) -> Tensor:
        """All pieces, or those of the first layers; the last hidden states."""
        run, chosen = self.run, self.plan.layers[:layers]
        parallel = self.plan.way is Residual.PARALLEL
        with piece():
            # Embeddings that are normed come with that, behind the tables.
            tables = [] if self.plan.way is Residual.BEHIND else self._tables()
            residual = run.new(self.width, "embedded")
            tables = tables or self._tables()
            normed = residual if self.plan.way is Residual.BEHIND else run.new(self.width, "normed")
            kept = self._turned(chosen[0], [] if parallel or normed is residual else [normed])
            attended = run.new(self.tokens * self.plan.queries, "attention output")
        attend(self.tokens)
        run.free(*kept)
        for at, (layer, following) in enumerate(itertools.pairwise(chosen), start=2):
            held = [attended, *([normed] if parallel else []), residual, *(tables if at == len(chosen) else [])]
            before = self.plan.way is Residual.BEFORE
            with piece():
                residual, down = self._fed(layer)
                if self.plan.way is not Residual.BEHIND:
                    normed = run.new(self.width, "normed")
                kept = self._turned(following, [normed] if before else [down])
                attended = self._taken([down] if before else [], self.tokens * self.plan.queries, "attention output")
            run.free(*held)
            attend(self.tokens)
            run.free(*kept)
        with piece():
            result, down = self._fed(chosen[-1])
        run.free(down, attended, *([normed] if parallel else []), residual)
        return result

    def _tables(self) -> list[Tensor]:
        return [self.run.new(self.tokens * one, "cosines or sines") for one in self.plan.tables]

    def _fed(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """(attention's projected output, the feed-forward layer's)."""
        first = layer.out.product(self.tokens)
        normed = [self.run.new(self.width, "normed")] if self.plan.way is Residual.BEFORE else []
        return first, self._dense(layer, *normed)

    def _dense(self, layer: Layer, *normed: Tensor) -> Tensor:
        """The feed-forward layer's output. An activation that is not gated lies where its input did."""
        run, down = self.run, layer.down
        wide = layer.up.product(self.tokens)
        run.free(*normed)
        if not layer.gated:
            return run.replacing(wide, down.product(self.tokens))
        fused = layer.quantises and down.slots is None
        narrow = down.method.narrow_inputs(self.tokens, down.inputs) if fused else []
        acted = [run.new(size, "activated") for size in narrow or [wide.bytes // 2]]
        run.free(wide)
        return run.replacing(*acted, down.product(self.tokens, narrow=bool(narrow)))

    def _turned(self, layer: Layer, dead: list[Tensor]) -> list[Tensor]:
        """Turned keys; queries, keys and values; turned queries, which lie in a buffer that is ``dead``."""
        whole = layer.into.product(self.tokens)
        keys = self.run.new(self.tokens * self.plan.keys, "turned keys")
        return [keys, whole, self._taken(dead, self.tokens * self.plan.queries, "turned queries")]

    def _taken(self, dead: list[Tensor], size: int, label: str) -> Tensor:
        """A dead buffer of that size, else a new one."""
        if dead and dead[0].bytes == size:
            return dead[0]
        self.run.free(*dead)
        return self.run.new(size, label)
