"""Decoders of attention and gated feed-forward layers: Llama and its kin, Qwen, Gemma, and those with experts.

Followed from vllm 0.32.0, ``model_executor/models/{llama,qwen2,qwen3,qwen3_moe,mixtral,gemma2,gemma3}.py``. They differ
in few places, each a field of :class:`Style`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from graphmem.serving.vllm.layers import (
    AttentionScales,
    Embedding,
    Linear,
    dropped_head,
    long_rotary,
    root_mean_square,
    rotary,
    turned_by_factors,
)
from graphmem.serving.vllm.lora import Adapters, Slots, wrapper
from graphmem.serving.vllm.models.base import LOCAL_ROPE, Attend, Family, Piece, Shape, Stage
from graphmem.serving.vllm.models.experts import Experts
from graphmem.serving.vllm.models.feed_forward import FeedForward as FeedForward
from graphmem.serving.vllm.models.feed_forward import Style as Style
from graphmem.serving.vllm.models.latent import LatentAttention
from graphmem.serving.vllm.models.narrow import pieces_of
from graphmem.serving.vllm.models.pieces import Layer as Planned
from graphmem.serving.vllm.models.pieces import Plan, Residual, scales_of
from graphmem.serving.vllm.models.summed import Ends
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.trace import Category


class Norm:
    """``RMSNorm``, whose kernels write in place, and ``GemmaRMSNorm``, which runs as torch operators in fp32."""

    def __init__(self, run: Run, name: str, width: int, itemsize: int, kind: str) -> None:
        self.run, self.name, self.width, self.itemsize, self.kind = run, name, width, itemsize, kind
        run.new(width * itemsize, f"{name}.weight")

    def plain(self, tokens: int, heads: int = 1) -> Tensor:
        """Normed, as a new tensor."""
        self.run.enter(self.name)
        rows, width = tokens * heads, self.width
        if self.kind == "rms":
            return self.run.new(rows * width * self.itemsize, "normed")
        run, wide = self.run, rows * width * 4
        weight = self._weight()
        return run.replacing(run.new(wide), weight, self._gemma(rows, wide))

    def added(self, tokens: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, residual): in place, or both new; the old ones are the caller's to free."""
        self.run.enter(self.name)
        if self.kind == "rms":
            return hidden, residual
        run, wide = self.run, tokens * self.width * 4
        weight = self._weight()
        first, second = run.new(wide), run.new(wide)
        total = run.replacing(second, first, run.new(wide))
        new_residual = run.new(tokens * self.width * self.itemsize, "residual")
        return run.replacing(total, weight, self._gemma(tokens, wide)), new_residual

    def _weight(self) -> Tensor:
        """``weight.float() + 1.0``."""
        return self.run.replacing(self.run.new(self.width * 4), self.run.new(self.width * 4))

    def _gemma(self, rows: int, wide: int) -> Tensor:
        """``rms_norm`` as torch operators: a product in fp32, and back to the model's precision."""
        run = self.run
        mean, scaled = root_mean_square(run, rows, wide)
        weighted = run.replacing(scaled, run.new(wide))
        return run.replacing(weighted, mean, run.new(wide * self.itemsize // 4, "normed"))


class Mixing(Protocol):
    """The part of a layer before its feed-forward layer: attention, or a state."""

    @property
    def scales(self) -> AttentionScales | None:
        """Of a quantised KV cache; None where there is none."""

    def finish(self) -> None:
        """After loading."""

    def __call__(self, tokens: int) -> Tensor:
        """Its output, which is of the hidden states' size; the input is the caller's."""


class Projected:
    """The projections of attention: queries, keys and values in one product (twice the queries where the output is
    ``gated``), and the output's; with a table of rotations and the scales of its cache."""

    def __init__(
        self, run: Run, name: str, shape: Shape, *, bias: bool, output_bias: bool = False, gated: bool = False
    ) -> None:
        self.run, self.name, self.shape = run, name, shape
        self.heads, self.kv_heads = shape.heads // run.tp, max(1, shape.kv_heads // run.tp)
        self.q, self.kv = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        method, size, outputs = shape.linear, shape.itemsize, [self.q * (1 + gated), self.kv, self.kv]
        self.qkv_proj = Linear(run, f"{name}.qkv_proj", shape.hidden, outputs, method, size, bias=bias)
        self.o_proj = Linear(run, f"{name}.o_proj", self.q, [shape.hidden], method, size, bias=output_bias, reduce=True)

    def make_table(self, kind: object = None) -> None:
        """The table of rotations; the engine keeps one for equal arguments."""
        run, shape = self.run, self.shape
        local = kind == LOCAL_ROPE  # tables of windows are not stretched
        rope = (kind, shape.positions if local else shape.rope_positions, shape.rotary_dim)
        if rope not in run.ropes:
            run.ropes.add(rope)
            if shape.rope_short:
                long_rotary(run, f"{self.name}.rotary_emb", rope[1], shape.rope_short, rope[2], shape.itemsize)
                return
            rotary(
                run, f"{self.name}.rotary_emb", rope[1], shape.rotary_dim, shape.itemsize,
                scaled=shape.rope_scaled, linear=shape.rope_linear and not local,
            )  # fmt: skip

    def make_scales(self) -> None:
        """Of a quantised KV cache."""
        self.scales = AttentionScales(self.run, f"{self.name}.attn", self.shape.linear, self.shape.itemsize)

    def finish(self) -> None:
        """After loading."""
        self.qkv_proj.finish()
        self.o_proj.finish()
        self.scales.load()


class Attention(Projected):
    """As Llama's."""

    def __init__(self, run: Run, name: str, shape: Shape, style: Style, layer: int) -> None:
        bias = style.qkv_bias or shape.attention_bias
        super().__init__(run, name, shape, bias=bias, output_bias=shape.output_bias)
        self.style = style
        self.norms: tuple[Norm, Norm] | None = None
        if style.head_norms and style.norm == "gemma":
            self.norms = self._head_norms()
        self.make_table(shape.rope_of(layer))
        self.make_scales()
        if style.head_norms and self.norms is None:
            self.norms = self._head_norms()

    def _head_norms(self) -> tuple[Norm, Norm]:
        width, size, kind = self.shape.head_dim, self.shape.itemsize, self.style.norm
        names = (f"{self.name}.{side}_norm" for side in "qk")
        first, second = (Norm(self.run, name, width, size, kind) for name in names)
        return first, second

    def __call__(self, tokens: int) -> Tensor:
        """The projected output. No attention runs while the engine profiles: its output is an empty tensor."""
        run, size = self.run, self.shape.itemsize
        own = [self.qkv_proj(tokens)]
        if self.norms is not None:
            own += [self.norms[0].plain(tokens, self.heads), self.norms[1].plain(tokens, self.kv_heads)]
        if self.shape.position_rows:  # rows of the table for each position, and both halves of what is taken of them
            table = self.shape.position_rows * tokens * self.shape.rotary_dim * size
            run.temporary(table, table // 2, table // 2)
        if self.shape.rope_short:
            heads, turned, width = (self.heads, self.kv_heads), self.shape.rotary_dim, self.shape.head_dim
            own += turned_by_factors(run, tokens, heads, turned, width, size, self.shape.rope_short)
        run.enter(f"{self.name}.attn")
        narrow = run.narrowed(tokens * self.q)
        attended = run.new(tokens * self.q * size, "attention output")
        run.free(*narrow)
        return run.replacing(*own, attended, self.o_proj(tokens))


class Layer:
    """One decoder layer. ``mixing`` makes its part before the feed-forward layer."""

    def __init__(
        self, run: Run, name: str, shape: Shape, style: Style, mixing: Callable[[str, int], Mixing], index: int
    ) -> None:
        self.run, self.style, self.shape = run, style, shape
        self.attention = mixing(name, index)
        self.mlp: FeedForward | Experts
        if shape.experts is not None and shape.experts.in_layer(index):
            self.mlp = Experts(run, f"{name}.mlp", shape, shape.experts)
        else:
            self.mlp = FeedForward(run, f"{name}.mlp", shape, style)
        names = ["input_layernorm", "post_attention_layernorm"]
        if style.post_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        self.enters_normed = style.first_norm or index > 0
        made = names if self.enters_normed else names[1:]
        self.norms = [Norm(run, f"{name}.{one}", shape.hidden, shape.itemsize, style.norm) for one in made]
        if not self.enters_normed:
            self.norms.insert(0, self.norms[0])  # not called

    def finish(self) -> None:
        """After loading."""
        self.attention.finish()
        self.mlp.finish()

    def __call__(self, tokens: int, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(hidden, residual) after the layer. The input is still the caller's, and tensors it made are not."""
        run, given = self.run, (hidden, residual)

        def drop(tensor: Tensor, *kept: Tensor) -> None:
            if tensor not in given and tensor not in kept:
                run.free(tensor)

        if residual is None:
            residual = hidden
            normed = self.norms[0].plain(tokens) if self.enters_normed else hidden
        else:
            normed, residual = self.norms[0].added(tokens, hidden, residual)
        attended = self.attention(tokens)
        drop(normed)
        if self.style.post_norms:
            attended = run.replacing(attended, self.norms[1].plain(tokens))
        middle = residual
        normed, residual = self.norms[2 if self.style.post_norms else 1].added(tokens, attended, residual)
        if normed is not attended:
            run.free(attended)
            drop(middle, residual)
        output = run.replacing(normed, self.mlp(tokens))
        if self.style.post_norms:
            output = run.replacing(output, self.norms[3].plain(tokens))
        return output, residual


#: (tokens, hidden, residual) -> (hidden, residual).
Step = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Decoder(Family):
    """The whole model."""

    def __init__(self, run: Run, shape: Shape, style: Style) -> None:
        self.run, self.shape, self.style, self.soft_cap = run, shape, style, style.soft_cap
        size, stage = shape.itemsize, shape.own
        if stage.first or (shape.tied and stage.last):
            self.embedding = Embedding(run, "model.embed_tokens", shape.vocab, shape.hidden, size)
        self.layers = [Layer(run, f"model.layers.{index}", shape, style, self.mixing, index) for index in stage.layers]
        if stage.last:
            self.norm = Norm(run, "model.norm", shape.hidden, size, style.norm)
        if style.scales_embedding:
            run.new(size, "model.normalizer", Category.BUFFER)
        if stage.last:
            self.head = self._head()
        self.hands_on = 1 if stage.last else 2
        self._received: tuple[Tensor, Tensor] | None = None
        #: Embeddings that come from an encoder's buffer.
        self._given: Tensor | None = None
        #: Layers after which hidden states are kept for a draft, and what was kept.
        self.taps: tuple[int, ...] = ()
        self.tapped: list[Tensor] = []
        self._sent: Tensor | None = None

    def mixing(self, name: str, index: int) -> Mixing:
        """The part of the layer before its feed-forward layer."""
        run, shape = self.run, self.shape
        if shape.latent is not None:
            return LatentAttention(run, f"{name}.self_attn", shape, shape.latent, run.ropes)
        return Attention(run, f"{name}.self_attn", shape, self.style, index)

    @classmethod
    def layers_alone(cls, run: Run, shape: Shape, style: Style) -> Decoder:
        """The layers without embeddings, last norm and head."""
        return cls(run, replace(shape, stage=Stage(range(shape.layers), first=False, last=False)), style)

    def through(self, tokens: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden, residual) after the layers; the input is let go, or is the residual."""
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = self.passed(layer, tokens, hidden, residual)
        assert residual is not None
        return hidden, residual

    def passed(
        self, layer: Step, tokens: int, hidden: Tensor, residual: Tensor | None, kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """(hidden, residual) after a layer; those before it are let go, but for what is ``kept``."""
        after = layer(tokens, hidden, residual)
        self.run.free(*[old for old in dict.fromkeys((hidden, residual)) if old and old not in (*after, *kept)])
        return after

    def _head(self) -> Embedding:
        run, shape = self.run, self.shape
        if shape.tied and not self.style.makes_tied_head:
            return self.embedding
        return dropped_head(run, shape.vocab, shape.hidden, shape.itemsize, self.embedding if shape.tied else None)

    def receive(self, tokens: int) -> None:
        if self.shape.state is not None:
            super().receive(tokens)
        run, size = self.run, tokens * self.shape.hidden * self.shape.itemsize
        hidden = run.new(size, "hidden states of the stage before", Category.BUFFER)
        self._received = hidden, run.new(size, "residual of the stage before", Category.BUFFER)

    def finish(self) -> None:
        for layer in self.layers:
            layer.finish()
        for layer in self.layers:
            if layer.attention.scales is not None:
                layer.attention.scales.finish()

    def adapt(self, adapters: Adapters) -> list[Slots]:
        if self.shape.experts is not None or self.shape.latent is not None or self.shape.state is not None:
            return super().adapt(adapters)
        wrapper(self.run, adapters)
        stage, tables = self.shape.own, self.style.adapts_tables
        made: list[Slots] = [self.embedding.adapt(adapters, head=False)] if stage.first and tables else []
        for layer in self.layers:
            assert isinstance(layer.attention, Attention)
            assert isinstance(layer.mlp, FeedForward)
            linears = (
                layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj,
            )  # fmt: skip
            made += [linear.adapt(adapters, whole=self.style.fused) for linear in linears]
        return [*made, self.head.adapt(adapters, head=True)] if stage.last and tables else made

    def forward(self, tokens: int) -> Tensor:
        return self._forward(tokens, self.layers)

    def _forward(self, tokens: int, layers: list[Layer]) -> Tensor:
        run = self.run
        hidden, residual = self._entered(tokens)
        kept = self._received or (() if self._given is None else (self._given,))
        deep = len(self.shape.encoder.deep) if self.shape.encoder is not None else 0
        for number, layer in enumerate(layers, start=1):
            hidden, residual = self.passed(layer, tokens, hidden, residual, kept)
            if number <= deep:  # states of the encoder's layers are added
                hidden = run.replacing(hidden, run.new(hidden.bytes, "with the encoder's states"))
            if number in self.taps:
                self.tapped.append(run.new(hidden.bytes, "kept for the draft"))
        assert residual is not None
        if not self.shape.own.last:
            self._sent = residual
            return hidden
        normed, added = self.last(tokens, hidden, residual)
        run.free(*[old for old in dict.fromkeys((hidden, residual, added)) if old not in (normed, *kept)])
        return normed

    def last(self, tokens: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states behind the last layer, the sum that they are the norm of)."""
        return self.norm.added(tokens, hidden, residual)

    def _entered(self, tokens: int) -> tuple[Tensor, Tensor | None]:
        """(hidden, residual) before the first layer of this stage."""
        if self._received is not None:
            return self._received
        if self._given is not None:
            return self._given, None
        run, hidden = self.run, self.embedding(tokens)
        if self.style.scales_embedding:
            hidden = run.replacing(hidden, run.new(hidden.bytes, "scaled embedding"))
        return hidden, None

    def give(self, embeddings: Tensor) -> None:
        self._given = embeddings

    def tap(self, layers: tuple[int, ...]) -> None:
        self.taps = layers

    def taken(self) -> list[Tensor]:
        taken, self.tapped = self.tapped, []
        return taken

    def send(self, hidden: Tensor) -> None:
        self.run.free(hidden)
        if self._sent is not None and self._sent not in (self._received or ()):
            self.run.free(self._sent)

    def compiled(self, tokens: int, attend: Attend, piece: Piece, layers: int | None = None) -> Tensor:
        """The pieces that torch.compile makes between calls of attention, with the buffers that Inductor's plan
        leaves."""
        plan = self.plan()
        if plan is None:
            with piece():
                return self._forward(tokens, self.layers if layers is None else self.layers[:layers])
        stage = self.shape.own
        slots = self.embedding.slots if stage.first else None
        ends = Ends(
            self._given, self._received is not None, not stage.last, 0 if slots is None else slots.row_bytes
        )  # fmt: skip
        with self.run.as_compiled():
            pieces = pieces_of(self.run, plan, tokens, ends)
            result = pieces.whole(attend, piece, layers)
        self._sent = pieces.sent
        return result

    def plan(self) -> Plan | None:
        shape, size, first = self.shape, self.shape.itemsize, self.layers[0].attention
        if shape.latent is not None or shape.state is not None:
            return None
        found = [self._planned(layer) for layer in self.layers]
        assert isinstance(first, Attention)
        half = shape.rotary_dim // 2 * size  # cosines and sines of every token, put together of its positions
        return Plan(
            Residual.BY_NORMS, tuple(found), shape.hidden * size, first.q * size, first.kv * size,
            scales_of(found) if self._is_alone() else None, positions=(half, half) if shape.position_rows else (),
            norms_behind=self.style.post_norms, head_norms=self.style.head_norms,
        )  # fmt: skip

    def _planned(self, layer: Layer) -> Planned:
        own, fed = layer.attention, layer.mlp
        assert isinstance(own, Attention)
        if isinstance(fed, Experts):
            return Planned(own.qkv_proj, own.o_proj, None, experts=fed)
        quantises = self.style.quantises_activation
        return Planned(own.qkv_proj, own.o_proj, (fed.gate_up_proj, fed.down_proj), quantises=quantises)

    def _is_alone(self) -> bool:
        """Whether its kernels may write what products read in eight bits."""
        stage, shape = self.shape.own, self.shape
        alone = stage.first and stage.last and self._given is None and not self.embedding.slots
        return alone and self.style.norm == "rms" and not shape.position_rows and not shape.rope_short
