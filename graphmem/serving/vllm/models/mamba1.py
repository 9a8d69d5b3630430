"""Mamba 1 (state-spaces/mamba, FalconMamba) and Jamba, whose layers are of such states, of attention, and of experts
(vllm 0.32.0, models/{mamba,jamba}.py, layers/mamba/mamba_mixer.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted
from graphmem.serving.vllm.layers import AttentionScales, Linear, LinearMethod, Unquantized, cdiv, dropped_head
from graphmem.serving.vllm.models.base import Shape, StateShape, plain_shape
from graphmem.serving.vllm.models.decoder import Decoder, Mixing, Projected, Style
from graphmem.serving.vllm.models.mamba import StatesOnly
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.sources.vllm_layers import ExpertShape


@dataclass(frozen=True)
class SelectiveShape(StateShape):
    """``inner``: channels; ``size``: of the state of one; ``kernel``: of the convolution; ``rank``: of the values that
    time steps are projected from. ``normed``: that, and both projections of the state, are."""

    inner: int
    size: int
    kernel: int
    rank: int
    conv_bias: bool = True
    bias: bool = False
    normed: bool = True

    def shared(self, tp: int) -> SelectiveShape:
        return replace(self, inner=self.inner // tp)

    @property
    def page_bytes(self) -> int:
        return self.inner * ((self.kernel - 1) * self.conv_bytes + self.size * self.state_bytes)


class SelectiveMixer:
    """``MambaMixer``, whose layers are never quantised. While the engine profiles it neither convolves nor scans: it
    projects, copies one half and projects again. Its caller made the output, and the projections are let go."""

    def __init__(self, run: Run, name: str, shape: Shape, state: SelectiveShape) -> None:
        self.run, self.name, self.hidden, self.size = run, name, shape.hidden, shape.itemsize
        self.scales: AttentionScales | None = None
        own, size, plain = state.shared(run.tp), shape.itemsize, Unquantized(shape.itemsize)
        self.inner = own.inner
        run.new(own.inner * state.kernel * size, f"{name}.conv1d.weight")
        if state.conv_bias:
            run.new(own.inner * size, f"{name}.conv1d.bias")
        both = [own.inner, own.inner]
        self.in_proj = Linear(run, f"{name}.in_proj", shape.hidden, both, plain, size, bias=state.bias)
        Linear(run, f"{name}.x_proj", own.inner, [state.rank + 2 * state.size], plain, size)
        Linear(run, f"{name}.dt_proj", state.rank, [own.inner], plain, size, bias=True)
        run.new(own.inner * state.size * 4, f"{name}.A")
        run.new(own.inner * size, f"{name}.D")
        self.out_proj = Linear(
            run, f"{name}.out_proj", own.inner, [shape.hidden], plain, size, bias=state.bias, reduce=True
        )
        for width in (state.rank, state.size, state.size) if state.normed else ():
            run.new(width * size, f"{name}.layernorm.weight")

    def finish(self) -> None:
        """As it was loaded."""

    def __call__(self, tokens: int) -> Tensor:
        run = self.run
        run.enter(self.name)
        output = run.new(tokens * self.hidden * self.size, "output")
        projected = self.in_proj(tokens)
        convolved = run.new(tokens * self.inner * self.size, "what would be convolved, copied")
        run.free(convolved, projected, self.out_proj(tokens))
        return output


class Mamba(StatesOnly):
    """The whole model: norms in place, and mixers."""

    def __init__(self, run: Run, shape: Shape) -> None:
        state = shape.state
        assert isinstance(state, SelectiveShape)
        super().__init__(run, shape, lambda name: SelectiveMixer(run, name, shape, state))
        tied = self.embedding if shape.tied else None
        self.head = dropped_head(run, shape.vocab, shape.hidden, shape.itemsize, tied)


class Attention(Projected):
    """Without norms and without rotations."""

    def __init__(self, run: Run, name: str, shape: Shape) -> None:
        super().__init__(run, name, shape, bias=shape.attention_bias, output_bias=shape.attention_bias)
        self.make_scales()

    def __call__(self, tokens: int) -> Tensor:
        """The projected output; the input is the caller's."""
        qkv = self.qkv_proj(tokens)
        attended = self.run.new(tokens * self.q * self.shape.itemsize, "attention output")
        return self.run.replacing(attended, qkv, self.o_proj(tokens))


class Jamba(Decoder):
    """The whole model; its attention turns nothing."""

    def __init__(self, run: Run, shape: Shape) -> None:
        super().__init__(run, shape, Style())

    def mixing(self, name: str, index: int) -> Mixing:
        assert isinstance(self.shape.state, SelectiveShape)
        if index in self.shape.attends:
            return Attention(self.run, f"{name}.self_attn", self.shape)
        return SelectiveMixer(self.run, f"{name}.mamba", self.shape, self.shape.state)


def mamba_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes."""
    config = model.config
    inner = count(model, "intermediate_size", count(model, "expand", 2) * count(model, "hidden_size"))
    state = SelectiveShape(
        inner, count(model, "state_size", 16), count(model, "conv_kernel", 4, least=2), _rank(model, "time_step_rank"),
        conv_bias=bool(config.get("use_conv_bias", True)), bias=bool(config.get("use_bias")),
        normed=config.get("model_type") == "falcon_mamba", conv_bytes=itemsize, state_bytes=itemsize,
    )  # fmt: skip
    return plain_shape(
        model, itemsize, method, kind="mamba", intermediate=inner, heads=inner, kv_heads=inner, head_dim=1, positions=1,
        tied=bool(config.get("tie_word_embeddings", True)), rotary_dim=0, attention_bias=False, state=state,
    )  # fmt: skip


def jamba_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes (transformers, ``JambaConfig``)."""
    config = model.config
    layers, hidden, heads = (count(model, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    state = SelectiveShape(
        count(model, "mamba_expand", 2) * hidden, count(model, "mamba_d_state", 16),
        count(model, "mamba_d_conv", 4, least=2), _rank(model, "mamba_dt_rank"),
        conv_bias=bool(config.get("mamba_conv_bias", True)), bias=bool(config.get("mamba_proj_bias")),
        conv_bytes=itemsize, state_bytes=itemsize,
    )  # fmt: skip
    attends = _every(model, "attn_layer_period", 8, "attn_layer_offset", 4, layers)
    chosen = _every(model, "expert_layer_period", 2, "expert_layer_offset", 1, layers)
    width, number = count(model, "intermediate_size"), count(model, "num_experts", 16)
    dense = tuple(index for index in range(layers) if index not in chosen)
    experts = ExpertShape(number, count(model, "num_experts_per_tok", 2), width, dense_layers=dense)
    return plain_shape(
        model, itemsize, method, intermediate=width, head_dim=counted(model, "hidden_size / heads", hidden // heads),
        positions=count(model, "max_position_embeddings", 262144), tied=False, rope_positions=1, rotary_dim=0,
        attention_bias=False, experts=experts if number > 1 else None, state=state, attends=attends,
    )  # fmt: skip


def _every(model: ServedModel, period: str, usual: int, offset: str, first: int, layers: int) -> tuple[int, ...]:
    """Layers by a period and where it begins."""
    step, begins = count(model, period, usual), count(model, offset, first, least=0)
    if begins >= step:
        raise UsageError(f"{model.name}: {offset} is {begins}; accepted: 0 to {step - 1}, below {period}")
    return tuple(range(begins, layers, step))


def _rank(model: ServedModel, name: str) -> int:
    """Where it is "auto" or missing, a sixteenth of the hidden size."""
    if model.config.get(name, "auto") == "auto":
        return cdiv(count(model, "hidden_size"), 16)
    return count(model, name)
