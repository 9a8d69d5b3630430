"""Compiled pieces of decoders whose kernels write what products read in eight bits (``Float8``, ``Int8``), and whose
norms sum the residual."""

from __future__ import annotations

import itertools

from graphmem.serving.vllm.layers import Linear
from graphmem.serving.vllm.models.base import Attend, Piece
from graphmem.serving.vllm.models.pieces import Layer, Pieces, Plan, Residual
from graphmem.serving.vllm.models.summed import Ends, SummedPieces
from graphmem.serving.vllm.run import Run, Tensor


def pieces_of(run: Run, plan: Plan, tokens: int, ends: Ends | None = None) -> Pieces:
    """The pieces of a plan, for so many tokens."""
    if plan.way is not Residual.BY_NORMS:
        return Pieces(run, plan, tokens)
    if plan.scales is None:
        return SummedPieces(run, plan, tokens, ends or Ends())
    return (RanksNarrowPieces if run.tp > 1 else NarrowPieces)(run, plan, tokens)


class NarrowPieces(Pieces):
    """Of one rank. Scales of rows lie in one buffer a piece, and the norm that is not the piece's first is there in 16
    bits too."""

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

    def _first(self, layer: Layer) -> tuple[list[Tensor], Tensor, Tensor]:
        """(what attention reads, its output, the residual)."""
        whole = self._output(layer.into)
        residual = self.run.new(self.width, "embedded")
        self._multiplied(layer.into, self._narrow(layer.into), *self._scales())
        queries = self.tokens * self.plan.queries
        kept = [self.run.new(self.tokens * self.plan.keys, "turned keys"), whole]
        kept.append(self.run.new(queries, "turned queries"))
        return kept, self.run.new(queries, "attention output"), residual

    def _between(self, layer: Layer, following: Layer) -> tuple[list[Tensor], Tensor, Tensor]:
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

    def _last(self, layer: Layer) -> Tensor:
        """The last hidden states."""
        first, down, scales = self._narrow_fed(layer)
        self.run.free(*scales)
        result = self.run.new(self.width, "normed")
        self.run.free(first, down)
        return result

    def _narrow_fed(self, layer: Layer) -> tuple[Tensor, Tensor, list[Tensor]]:
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

    def _first(self, layer: Layer) -> tuple[list[Tensor], Tensor, Tensor]:
        run, embedded = self.run, self.run.new(self.width, "embedded")
        whole = self._output(layer.into)
        residual = run.replacing(embedded, self._reduced())
        self._multiplied(layer.into, self._narrow(layer.into), *self._scales())
        return *self._turned_apart(whole), residual

    def _between(self, layer: Layer, following: Layer) -> tuple[list[Tensor], Tensor, Tensor]:
        run = self.run
        first, residual, scales = self._narrow_fed(layer)
        second = self._reduced()
        normed = [run.new(self.width, "normed")] if scales else []
        narrow = self._narrow(following.into)
        run.free(second, *normed, first)
        whole = self._output(following.into)
        self._multiplied(following.into, narrow, *scales)
        return *self._turned_apart(whole), residual

    def _last(self, layer: Layer) -> Tensor:
        first, down, scales = self._narrow_fed(layer)
        self.run.free(*scales)
        return self.run.replacing(down, first, self._reduced())

    def _narrow_fed(self, layer: Layer) -> tuple[Tensor, Tensor, list[Tensor]]:
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
