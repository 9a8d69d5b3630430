"""Whisper's decoder (vllm 0.32.0, models/whisper.py): attention to what was read and to what was heard, LayerNorm out
of place, learned positions. What was heard is no part of the profile run."""

from __future__ import annotations

from graphmem.serving.base import ServedModel
from graphmem.serving.vllm.layers import AttentionScales, Embedding, LayerNorm, Linear, LinearMethod
from graphmem.serving.vllm.models.base import Family, Shape, plain_shape
from graphmem.serving.vllm.run import Run, Tensor

#: ``model_type`` of the decoder within a model that hears, and what such a configuration calls its sizes.
KIND = "whisper_decoder"
NAMES = {
    "hidden_size": "d_model", "intermediate_size": "decoder_ffn_dim", "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads", "max_position_embeddings": "max_target_positions",
}  # fmt: skip


class _Attention:
    """Attention to what was read, or (``crosses``) to what was heard, whose keys and values the cache has."""

    def __init__(self, run: Run, name: str, shape: Shape, *, crosses: bool) -> None:
        self.run, self.size, width = run, shape.itemsize, shape.hidden // run.tp
        self.width, parts = width, ({"q_proj": 1, "kv_proj": 2} if crosses else {"qkv_proj": 3})
        self.first, *_ = self.linears = [
            Linear(run, f"{name}.{part}", shape.hidden, [width] * count, shape.linear, self.size, bias=True)
            for part, count in parts.items()
        ]
        self.out = Linear(
            run, f"{name}.out_proj", width, [shape.hidden], shape.linear, self.size, bias=True, reduce=True
        )
        self.scales = AttentionScales(run, f"{name}.attn", shape.linear, self.size)

    def __call__(self, tokens: int) -> Tensor:
        """The output; the input is the caller's."""
        projected = self.first(tokens)
        attended = self.run.new(tokens * self.width * self.size, "attention output")
        return self.run.replacing(attended, projected, self.out(tokens))


class _Layer:
    def __init__(self, run: Run, name: str, shape: Shape) -> None:
        size, inner = shape.itemsize, shape.intermediate // run.tp
        self.run, self.row = run, shape.hidden * size
        self.steps: list[tuple[LayerNorm, _Attention | None]] = []
        for part in ("self_attn", "encoder_attn"):
            attention = _Attention(run, f"{name}.{part}", shape, crosses=part == "encoder_attn")
            self.steps.append((LayerNorm(run, f"{name}.{part}_layer_norm", shape.hidden, size), attention))
        self.fc1 = Linear(run, f"{name}.mlp.fc1", shape.hidden, [inner], shape.linear, size, bias=True)
        self.fc2 = Linear(run, f"{name}.mlp.fc2", inner, [shape.hidden], shape.linear, size, bias=True, reduce=True)
        self.steps.append((LayerNorm(run, f"{name}.final_layer_norm", shape.hidden, size), None))

    @property
    def attentions(self) -> list[_Attention]:
        """Both."""
        return [attention for _, attention in self.steps if attention is not None]

    def finish(self) -> None:
        """After loading."""
        for linear in (*(one for each in self.attentions for one in (*each.linears, each.out)), self.fc1, self.fc2):
            linear.finish()

    def __call__(self, tokens: int) -> Tensor:
        """The output; the input is the caller's."""
        run = self.run
        residual: list[Tensor] = []
        for norm, attention in self.steps:
            normed = norm(tokens)
            output = run.replacing(normed, self._fed(tokens) if attention is None else attention(tokens))
            residual = [run.replacing(*residual, output, run.new(tokens * self.row, "added"))]
        return residual[0]

    def _fed(self, tokens: int) -> Tensor:
        inner = self.fc1(tokens)
        acted = self.run.replacing(inner, self.run.new(inner.bytes, "activated"))
        return self.run.replacing(acted, self.fc2(tokens))


class Whisper(Family):
    """The decoder. Its table is whole on every rank, and is the head too."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape, row = run, shape, shape.hidden * shape.itemsize
        table = run.new(shape.vocab * row, "model.decoder.embed_tokens.weight")
        run.new(shape.positions * row, "model.decoder.embed_positions.weight")
        self.layers = [_Layer(run, f"model.decoder.layers.{index}", shape) for index in range(shape.layers)]
        self.norm = LayerNorm(run, "model.decoder.layer_norm", shape.hidden, shape.itemsize)
        self.head = Embedding(run, "proj_out", shape.vocab, shape.hidden, shape.itemsize)
        run.free(self.head.weight)
        self.head.weight, self.head.rows = table, shape.vocab

    def finish(self) -> None:
        for layer in self.layers:
            layer.finish()
        for attention in (one for layer in self.layers for one in layer.attentions):
            attention.scales.finish()

    def give(self, embeddings: Tensor) -> None:
        """It reads ids, and what was heard goes into the cache."""

    def forward(self, tokens: int) -> Tensor:
        run, size = self.run, tokens * self.shape.hidden * self.shape.itemsize
        run.enter("model.decoder")
        held = [run.new(size, label) for label in ("embedded", "embedded positions")]
        hidden = run.new(size, "hidden")
        for layer in self.layers:
            hidden = run.replacing(hidden, layer(tokens))
        return run.replacing(hidden, *held, self.norm(tokens))


def whisper_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes. A request has as many blocks of what was heard as the encoder's budget (``CrossAttentionSpec``)."""
    return plain_shape(model, itemsize, method, tied=True, crosses=True)
