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
from collections.abc import Iterator, Sequence
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
class DenseLayer:
    """The products of a layer: of queries, keys and values, of attention's output, and of the feed-forward layer, which
    is ``gated`` or not."""

    into: Linear
    out: Linear
    up: Linear
    down: Linear
    gated: bool


@dataclass(frozen=True)
class Plan:
    """A decoder that is followed in pieces. Sizes are bytes of one token; ``scales``: of the scale of an input in eight
    bits, None where products read what the model computes in. ``tables``: cosines and sines that are made for all
    layers at once."""

    way: Residual
    layers: tuple[DenseLayer, ...]
    hidden: int
    queries: int
    keys: int
    scales: int | None = None
    tables: tuple[int, ...] = ()


def plan_of(backend: Backend, linears: dict[str, Linear], norms: Sequence[str], itemsize: int) -> Plan | None:
    """The plan of a decoder whose layers are alike: four products each, all of one rank. None for another."""
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
    layers = tuple(DenseLayer(first, *rest) for first, rest in zip(into, parts, strict=True))
    hidden, heads = sum(layers[0].out.outputs) * itemsize, backend.heads * backend.head_dim * itemsize
    keys = backend.kv_heads * backend.head_dim * itemsize
    return Plan(way, layers, hidden, heads, keys, tables=_tables(backend.forward))


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


_Parts = tuple[Linear, Linear, Linear, bool]


def _layer(
    segment: list[Happening], linears: dict[str, Linear], norms: set[str], *, sums: bool
) -> tuple[Residual | None, _Parts, Linear | None] | None:
    """(the way of residuals, the products behind attention, that before the next attention) of a segment."""
    at = [place for place, one in enumerate(segment) if one.kind == "returned" and one.name in linears]
    if len(at) not in (3, 4) or any(linears[segment[one].name].reduce for one in at):
        return None
    own = [linears[segment[place].name] for place in at]
    out, up, down = own[:3]
    parts = (out, up, down, sum(up.outputs) == 2 * down.inputs)
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
            with piece():
                residual, down = self._fed(layer)
                if self.plan.way is not Residual.BEHIND:
                    first = residual
                    residual = run.new(self.width, "residual") if self.plan.way is Residual.BY_NORMS else first
                    normed = run.new(self.width, "normed")
                    if residual is not first:
                        run.free(first)
                before = self.plan.way in (Residual.BY_NORMS, Residual.BEFORE)
                kept = self._turned(following, [normed] if before else [down])
                attended = self._taken([down] if before else [], self.tokens * self.plan.queries, "attention output")
            run.free(*held)
            attend(self.tokens)
            run.free(*kept)
        with piece():
            first, down = self._fed(chosen[-1])
        result, other = (down, first) if self.plan.way is Residual.BY_NORMS else (first, down)
        run.free(other, attended, *([normed] if parallel else []), residual)
        return result

    def _tables(self) -> list[Tensor]:
        return [self.run.new(self.tokens * one, "cosines or sines") for one in self.plan.tables]

    def _fed(self, layer: DenseLayer) -> tuple[Tensor, Tensor]:
        """(attention's projected output, the feed-forward layer's). An activation that is not gated lies where its
        input did."""
        run, tokens = self.run, self.tokens
        first = layer.out.product(tokens)
        normed = [run.new(self.width, "normed")] if self.plan.way in (Residual.BY_NORMS, Residual.BEFORE) else []
        wide = layer.up.product(tokens)
        run.free(*normed)
        if layer.gated:
            wide = run.replacing(wide, run.new(wide.bytes // 2, "activated"))
        return first, run.replacing(wide, layer.down.product(tokens))

    def _turned(self, layer: DenseLayer, dead: list[Tensor]) -> list[Tensor]:
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


class NarrowPieces(Pieces):
    """Those of layers whose norms sum residuals and whose products read eight bits. Scales of rows lie in one buffer a
    piece, and the norm that is not the piece's first is there in 16 bits too."""

    def whole(self, attend: Attend, piece: Piece, layers: int | None) -> Tensor:
        run, chosen = self.run, self.plan.layers[:layers]
        with piece():
            kept, attended, residual = self._first(chosen[0])
        attend(self.tokens)
        run.free(*kept)
        for layer, following in itertools.pairwise(chosen):
            held = [attended, residual]
            with piece():
                kept, attended, residual = self._between(layer, following)
            run.free(*held)
            attend(self.tokens)
            run.free(*kept)
        with piece():
            result = self._last(chosen[-1])
        run.free(attended, residual)
        return result

    def _first(self, layer: DenseLayer) -> tuple[list[Tensor], Tensor, Tensor]:
        """(what attention reads, its output, the residual)."""
        whole = self._output(layer.into)
        residual = self.run.new(self.width, "embedded")
        self._multiplied(layer.into, self._narrow(layer.into), *self._scales())
        queries = self.tokens * self.plan.queries
        kept = [self.run.new(self.tokens * self.plan.keys, "turned keys"), whole]
        kept.append(self.run.new(queries, "turned queries"))
        return kept, self.run.new(queries, "attention output"), residual

    def _between(self, layer: DenseLayer, following: DenseLayer) -> tuple[list[Tensor], Tensor, Tensor]:
        """The same of the piece between the attention of two layers."""
        run, queries = self.run, self.tokens * self.plan.queries
        first, down, scales = self._narrow_fed(layer)
        residual = run.new(self.width, "residual")
        normed = [run.new(self.width, "normed")] if scales else []
        narrow = self._narrow(following.into)
        run.free(*[first] * bool(scales))
        whole = self._output(following.into)
        self._multiplied(following.into, narrow, *scales)
        keys = run.new(self.tokens * self.plan.keys, "turned keys")
        turned, spare = (normed[0], down) if normed else (down, first)
        kept = [keys, whole, self._taken([turned], queries, "turned queries")]
        return kept, self._taken([spare], queries, "attention output"), residual

    def _last(self, layer: DenseLayer) -> Tensor:
        """The last hidden states."""
        first, down, scales = self._narrow_fed(layer)
        self.run.free(*scales)
        result = self.run.new(self.width, "normed")
        self.run.free(first, down)
        return result

    def _narrow_fed(self, layer: DenseLayer) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(attention's projected output, the feed-forward layer's, the scales)."""
        run = self.run
        first = self._output(layer.out)
        narrow, scales = self._narrow(layer.out), self._scales()
        self._multiplied(layer.out)
        if layer.up.inputs != layer.out.inputs:
            narrow = run.replacing(narrow, self._narrow(layer.up))
        wide = self._output(layer.up)
        self._multiplied(layer.up, narrow)
        down = self._output(layer.down)
        self._multiplied(layer.down, run.replacing(wide, self._narrow(layer.down)))
        return first, down, scales

    def _multiplied(self, linear: Linear, *gone: Tensor) -> None:
        """A product, whose input may be let go behind it."""
        linear.method.share_sums(self.run, self.tokens, sum(linear.outputs))
        self.run.free(*gone)

    def _output(self, linear: Linear) -> Tensor:
        self.run.enter(linear.name)
        return self.run.new(self.tokens * sum(linear.outputs) * linear.itemsize)

    def _narrow(self, linear: Linear) -> Tensor:
        return self.run.new(self.tokens * linear.inputs, "input in eight bits")

    def _scales(self) -> list[Tensor]:
        return [self.run.new(self.tokens * self.plan.scales, "scales of rows")] if self.plan.scales else []


class RanksNarrowPieces(NarrowPieces):
    """The same of several ranks: a sum over them is a tensor of its own, behind which the buffer that was summed is
    free; the feed-forward layer's output lies where attention's did, and so does the residual's sum."""

    def _first(self, layer: DenseLayer) -> tuple[list[Tensor], Tensor, Tensor]:
        run, embedded = self.run, self.run.new(self.width, "embedded")
        whole = self._output(layer.into)
        residual = run.replacing(embedded, self._reduced())
        self._multiplied(layer.into, self._narrow(layer.into), *self._scales())
        return *self._turned_apart(whole), residual

    def _between(self, layer: DenseLayer, following: DenseLayer) -> tuple[list[Tensor], Tensor, Tensor]:
        run = self.run
        first, residual, scales = self._narrow_fed(layer)
        second = self._reduced()
        normed = [run.new(self.width, "normed")] if scales else []
        narrow = self._narrow(following.into)
        run.free(second, *normed, first)
        whole = self._output(following.into)
        self._multiplied(following.into, narrow, *scales)
        return *self._turned_apart(whole), residual

    def _last(self, layer: DenseLayer) -> Tensor:
        first, down, scales = self._narrow_fed(layer)
        self.run.free(*scales)
        return self.run.replacing(down, first, self._reduced())

    def _narrow_fed(self, layer: DenseLayer) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(attention's sum over the ranks, the feed-forward layer's output, the scales)."""
        run, down = self.run, self._output(layer.out)
        narrow, scales = self._narrow(layer.out), self._scales()
        self._multiplied(layer.out, narrow)
        first, narrow, wide = self._reduced(), self._narrow(layer.up), self._output(layer.up)
        self._multiplied(layer.up, narrow)
        self._multiplied(layer.down, run.replacing(wide, self._narrow(layer.down)))
        return first, down, scales

    def _reduced(self) -> Tensor:
        return self.run.new(self.width, "all-reduced")

    def _turned_apart(self, whole: Tensor) -> tuple[list[Tensor], Tensor]:
        queries = self.tokens * self.plan.queries
        turned = self.run.new(queries, "turned queries")
        kept = [self.run.new(self.tokens * self.plan.keys, "turned keys"), whole, turned]
        return kept, self.run.new(queries, "attention output")
