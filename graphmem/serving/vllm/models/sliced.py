"""Latent attention and experts between whose layers every tensor parallel rank has a slice of the tokens: where
replicas share experts (``use_sequence_parallel_moe``, vllm 0.32.0, models/deepseek_v2.py)."""

from __future__ import annotations

from functools import partial

from graphmem.serving.vllm.layers import cdiv
from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.models.decoder import Decoder, Layer, Style
from graphmem.serving.vllm.models.experts import Experts
from graphmem.serving.vllm.models.latent import LatentAttention
from graphmem.serving.vllm.run import Run, Tensor


class SlicedDecoder(Decoder):
    """Attention of a layer with experts gathers the slices and leaves its sum scattered."""

    def __init__(self, run: Run, shape: Shape, style: Style) -> None:
        super().__init__(run, shape, style)
        for layer in self.layers:
            if isinstance(layer.mlp, Experts):
                assert isinstance(layer.attention, LatentAttention)
                layer.attention.o_proj.reduce = False

    def _forward(self, tokens: int, layers: list[Layer]) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        residual: Tensor | None = None
        for layer in layers:
            step = partial(self._through, layer) if isinstance(layer.mlp, Experts) else layer
            hidden, residual = self.passed(step, tokens, hidden, residual)
        assert residual is not None
        return self._whole(tokens, hidden, residual)

    def _through(self, layer: Layer, tokens: int, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(hidden, residual), both of a slice, after a layer with experts. The input is still the caller's."""
        run, row = self.run, self.shape.hidden * self.shape.itemsize
        part = cdiv(tokens, run.tp) * row
        given = residual is not None and hidden.bytes != tokens * row
        normed = hidden
        if residual is None:
            residual, normed = hidden, layer.norms[0].plain(tokens)
        elif given:
            normed = run.new(part * run.tp, "gathered slices")
        attended = layer.attention(tokens)
        if normed is not hidden:
            run.free(normed)
        padded = run.replacing(attended, run.new(part * run.tp, "padded"))
        scattered = run.replacing(padded, run.new(part, "scattered"))
        if not given:
            residual = run.new(part, "slice of the residual")
        assert isinstance(layer.mlp, Experts)
        return run.replacing(scattered, layer.mlp.own(cdiv(tokens, run.tp))), residual

    def _whole(self, tokens: int, hidden: Tensor, residual: Tensor) -> Tensor:
        """The last norm; of slices after they were put side by side and gathered."""
        run = self.run
        if hidden.bytes == tokens * self.shape.hidden * self.shape.itemsize:
            normed, added = self.norm.added(tokens, hidden, residual)
            run.free(*[old for old in dict.fromkeys((hidden, residual, added)) if old is not normed])
            return normed
        beside = run.new(hidden.bytes + residual.bytes, "slices side by side")
        return run.replacing(beside, hidden, residual, run.new(beside.bytes * run.tp, "gathered slices"))
