"""Compiled pieces of decoders whose norms sum the residual, as in Llama and its kin.

Norms are fused with their sums. A dead buffer is taken again for one of its size, unless that would raise the piece's
peak (``MemoryPlanningLine.should_reuse_buffer``, torch/_inductor/codegen/wrapper.py): turned queries take the normed
input's, attention's output the feed-forward layer's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from graphmem.serving.vllm.models.base import Attend, Piece
from graphmem.serving.vllm.models.pieces import Layer, Pieces, Plan
from graphmem.serving.vllm.run import Run, Tensor


@dataclass(frozen=True)
class Ends:
    """Where a step begins and ends. ``given``: embeddings that an encoder made, instead of ids; ``received``: both sums
    come from a pipeline's stage before; ``sends``: both go to the next one; ``adapters``: bytes of a token's row that
    adapters of embeddings look up."""

    given: Tensor | None = None
    received: bool = False
    sends: bool = False
    adapters: int = 0


class SummedPieces(Pieces):
    """The pieces of a plan, for so many tokens."""

    def __init__(self, run: Run, plan: Plan, tokens: int, ends: Ends) -> None:
        super().__init__(run, plan, tokens)
        self.ends = ends
        self.queries = tokens * plan.queries
        self._means: list[Tensor] = []

    def whole(self, attend: Attend, piece: Piece, layers: int | None) -> Tensor:
        run, chosen = self.run, self.plan.layers[:layers]
        with piece():
            residual, normed = self._entered()
            kept = self._projected(chosen[0], normed)
            attended = run.new(self.queries, "attention output")
        attend(self.tokens)
        run.free(*kept)
        for layer, following in itertools.pairwise(chosen):
            held = [attended, *self._owned(residual)]
            with piece():
                residual, normed, spare = self._between(layer)
                kept = self._projected(following, normed)
                attended = spare or run.new(self.queries, "attention output")
            run.free(*held)
            attend(self.tokens)
            run.free(*kept)
        with piece():
            output, over = self._last(chosen[-1])
        run.free(*over, attended, *self._means, *self._owned(residual))
        return output

    def _owned(self, residual: Tensor) -> list[Tensor]:
        """A residual that is not the encoder's buffer."""
        return [] if residual is self.ends.given else [residual]

    def _entered(self) -> tuple[Tensor, Tensor]:
        """(residual, its norm) before the first layer."""
        run = self.run
        if self.ends.received:  # the sum of what came
            return run.new(self.width, "residual"), run.new(self.width, "normed")
        if self.ends.given is not None:
            return self.ends.given, run.new(self.width, "normed")
        embedded = run.new(self.width, "embedded")
        if self.ends.adapters:
            run.temporary(self.tokens * self.ends.adapters)
        if run.tp > 1:  # normed in place
            return run.new(self.width, "embedded and reduced"), embedded
        return embedded, run.new(self.width, "normed")

    def _projected(self, layer: Layer, normed: Tensor) -> list[Tensor]:
        """Turned keys; queries, keys and values; turned queries, in the normed input's buffer where that has their
        size."""
        run, whole = self.run, layer.into.product(self.tokens)
        run.temporary(*(self.tokens * one for one in self.plan.positions))
        wanted = self.queries // (layer.into.itemsize if run.narrow_queries else 1)
        turned = self._taken([normed], wanted, "turned queries")
        return [run.new(self.tokens * self.plan.keys, "turned keys"), whole, turned]

    def _parts(self, layer: Layer) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(attention's projected output, the feed-forward layer's, further buffers), all alive: the sum before experts
        and its norm, which the kernel after them writes anew."""
        run = self.run
        first = normed = layer.out.product(self.tokens)
        if run.tp > 1:
            first = run.new(self.width, "all-reduced")
        if self.plan.norms_behind:  # the sum behind the norm is made anew by the last kernel, from its rows' means
            self._means = [run.new(self.tokens * 4, "means of squares")]
        if run.tp == 1:
            normed = run.new(self.width, "normed")
        if layer.experts is None:
            return first, self._dense(layer, normed), []
        further = [normed, run.new(self.width, "sum before experts")] if run.tp == 1 else []
        output = layer.experts(self.tokens)
        if not further:
            run.free(normed)
        return first, output, further

    def _between(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor | None]:
        """(residual, its norm, a buffer of attention's output that is left) behind a layer."""
        run = self.run
        first, output, further = self._parts(layer)
        if run.tp > 1:
            reduced, normed = run.new(self.width, "all-reduced"), run.new(self.width, "normed")
            run.free(reduced, first, *self._means)
            return output, normed, None
        if further:
            run.free(first, output, *self._means)
            return further[1], further[0], None
        residual, normed = run.new(self.width, "residual"), run.new(self.width, "normed")
        run.free(first, *self._means)
        if self.queries == self.width:
            return residual, normed, output
        run.free(output)
        return residual, normed, None

    def _last(self, layer: Layer) -> tuple[Tensor, list[Tensor]]:
        """(what the step returns, what is left behind it)."""
        run = self.run
        if self.ends.sends and run.tp == 1 and layer.experts is None:
            first = layer.out.product(self.tokens)
            self.sent = run.new(self.width, "residual for the next stage")
            normed = run.new(self.width, "normed")
            run.free(first)
            return self._dense(layer, normed), []
        first, output, further = self._parts(layer)
        run.free(*further)
        if run.tp > 1:
            output = run.replacing(output, run.new(self.width, "all-reduced"))
        if self.ends.sends:
            self.sent = run.new(self.width, "residual for the next stage")
        return output, [first]
