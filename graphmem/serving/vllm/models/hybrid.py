"""Granite 4: layers of states and of attention, each before a gated feed-forward layer (vllm 0.32.0,
models/granitemoehybrid.py). Sums with the residual are torch operators: a product by a factor, then a sum."""

from __future__ import annotations

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted, listed
from graphmem.serving.vllm.layers import Embedding, LinearMethod, dropped_head
from graphmem.serving.vllm.models.base import Family, Shape, plain_shape
from graphmem.serving.vllm.models.decoder import FeedForward, Norm, Projected, Style
from graphmem.serving.vllm.models.mamba import Mixer, ScanShape
from graphmem.serving.vllm.run import Run, Tensor


class Attention(Projected):
    """Without norms, and of some models without rotations."""

    def __init__(self, run: Run, name: str, shape: Shape) -> None:
        super().__init__(run, name, shape, bias=shape.attention_bias, output_bias=shape.attention_bias)
        if shape.rotary_dim:
            self.make_table()
        self.make_scales()

    def __call__(self, tokens: int) -> Tensor:
        """The projected output; the input is the caller's."""
        qkv = self.qkv_proj(tokens)
        attended = self.run.new(tokens * self.q * self.shape.itemsize, "attention output")
        return self.run.replacing(attended, qkv, self.o_proj(tokens))


class Layer:
    """States or attention, then the feed-forward layer."""

    def __init__(self, run: Run, name: str, shape: Shape, *, attends: bool) -> None:
        self.run, self.attends = run, attends
        self.mixer: Mixer | Attention
        if attends:
            self.mixer = Attention(run, f"{name}.self_attn", shape)
        else:
            assert isinstance(shape.state, ScanShape)
            self.mixer = Mixer(run, f"{name}.mixer", shape, shape.state)
        self.mlp = FeedForward(run, f"{name}.shared_mlp", shape, Style())
        for one in ("input_layernorm", "post_attention_layernorm"):
            Norm(run, f"{name}.{one}", shape.hidden, shape.itemsize, "rms")

    def finish(self) -> None:
        """After loading."""
        self.mixer.finish()
        self.mlp.finish()

    def __call__(self, tokens: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden, the residual within), both for the caller to let go; so is ``hidden``, after both are made."""
        run, width = self.run, hidden.bytes
        normed = run.new(width, "normed")
        output = self.mixer(tokens)
        if self.attends:
            run.free(normed)
        scaled, middle = run.new(width), run.new(width, "residual")
        run.free(scaled, output if self.attends else normed)
        fed = run.replacing(run.new(width, "normed"), self.mlp(tokens))
        scaled, result = run.new(width), run.new(width, "hidden")
        run.free(scaled, fed)
        if not self.attends:
            run.free(output)
        return result, middle


class GraniteHybrid(Family):
    """The whole model. Inductor's code of its sums is not followed."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape = run, shape
        size = shape.itemsize
        self.embedding = Embedding(run, "model.embed_tokens", shape.vocab, shape.hidden, size)
        self.layers = [
            Layer(run, f"model.layers.{index}", shape, attends=index in shape.attends) for index in range(shape.layers)
        ]
        Norm(run, "model.norm", shape.hidden, size, "rms")
        self.head = dropped_head(run, shape.vocab, shape.hidden, size, self.embedding if shape.tied else None)

    def finish(self) -> None:
        for layer in self.layers:
            layer.finish()
        for layer in self.layers:
            if isinstance(layer.mixer, Attention):
                layer.mixer.scales.finish()

    def forward(self, tokens: int) -> Tensor:
        run = self.run
        hidden = self.embedding(tokens)
        held = [hidden]
        for layer in self.layers:
            hidden, middle = layer(tokens, hidden)
            run.free(*held)
            held = [hidden, middle]
        return run.replacing(*held, run.new(hidden.bytes, "normed"))


def granite_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes. Raises :class:`UsageError` for one with experts."""
    config = model.config
    layers, hidden, heads = (count(model, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if config.get("num_local_experts"):
        raise UsageError(f"{model.name}: experts beside layers of states are not followed")
    kinds = listed(model, "layer_types") or listed(model, "layers_block_type")
    if len(kinds) != layers or not set(kinds) <= {"mamba", "attention"}:
        raise UsageError(f"{model.name}: layer_types are {shown(kinds)}; accepted: mamba or attention for each layer")
    state = ScanShape(
        count(model, "mamba_n_heads"), count(model, "mamba_d_head"), count(model, "mamba_n_groups", 1),
        count(model, "mamba_d_state"), count(model, "mamba_d_conv", 4, least=2), count(model, "mamba_chunk_size", 256),
        conv_bias=bool(config.get("mamba_conv_bias", True)), bias=bool(config.get("mamba_proj_bias")),
        conv_bytes=itemsize, state_bytes=itemsize,
    )  # fmt: skip
    head_dim = counted(model, "hidden_size / heads", hidden // heads)
    return plain_shape(
        model, itemsize, method, intermediate=count(model, "shared_intermediate_size"), head_dim=head_dim,
        rotary_dim=head_dim if config.get("position_embedding_type") == "rope" else 0, state=state,
        attends=tuple(index for index, kind in enumerate(kinds) if kind == "attention"),
    )  # fmt: skip
