"""Kimi Linear: delta nets whose gates have low ranks, beside latent attention without rotations (vllm 0.32.0,
models/kimi_k3/nvidia/{model,mla}.py, layers/mamba/gdn/kimi_gdn_linear_attn.py)."""

from __future__ import annotations

from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted, mapping
from graphmem.serving.vllm.layers import AttentionScales, Linear, LinearMethod
from graphmem.serving.vllm.models.base import LatentShape, Shape, plain_shape
from graphmem.serving.vllm.models.decoder import Decoder, Mixing, Style
from graphmem.serving.vllm.models.deltanet import DeltaShape
from graphmem.serving.vllm.models.latent import UnpackedScales
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.sources.vllm_layers import ExpertShape
from graphmem.trace import Category

_WIDE = 4
#: ``min_moe_intermediate_per_partition``: experts are padded to as much on a rank that has a slice of each.
_LEAST_WIDTH = 256
#: Fields of Kimi K3, whose layers are others.
_K3 = ("q_lora_rank", "mla_use_output_gate", "attn_res_block_size", "routed_expert_hidden_size")


class LowRankDeltaNet:
    """``KimiGatedDeltaNetAttention``. Nothing is convolved or scanned while the engine profiles."""

    scales: AttentionScales | None = None

    def __init__(self, run: Run, name: str, shape: Shape, state: DeltaShape) -> None:
        self.run, self.name, self.size, self.state = run, name, shape.itemsize, state.shared(run.tp)
        self._linears: list[Linear] = []
        own, size, rank = self.state, shape.itemsize, state.value_dim

        def linear(part: str, inputs: int, outputs: list[int], *, reduce: bool = False) -> Linear:
            made = Linear(run, f"{name}.{part}", inputs, outputs, shape.linear, size, reduce=reduce)
            self._linears.append(made)
            return made

        self.qkvfab = linear("in_proj_qkvgfab", shape.hidden, [own.values] * 3 + [own.value_heads, rank])
        self.rates = linear("f_b_proj", rank, [own.values])
        run.new(own.values * _WIDE, f"{name}.dt_bias")
        run.new(own.convolved * own.kernel * _WIDE, f"{name}.conv1d.weight")
        run.new(own.value_heads * _WIDE, f"{name}.A_log")
        self.gates = [linear("g_a_proj", shape.hidden, [rank]), linear("g_b_proj", rank, [own.values])]
        run.new(rank * size, f"{name}.o_norm.weight")
        self.o_proj = linear("o_proj", own.values, [shape.hidden], reduce=True)

    def finish(self) -> None:
        """After loading."""
        for linear in self._linears:
            linear.finish()

    def __call__(self, tokens: int) -> Tensor:
        run = self.run
        held = [self.qkvfab(tokens)]
        compressed = self.gates[0](tokens)
        held += [run.replacing(compressed, self.gates[1](tokens)), self.rates(tokens)]
        held.append(run.new(tokens * self.state.values * self.size, "scanned"))
        return run.replacing(*held, self.o_proj(tokens))


class PlainLatentAttention:
    """``MultiHeadLatentAttention`` with queries of full rank, which are let go before the output's projection. While
    the engine profiles its output is zeros, and no context is unpacked."""

    def __init__(self, run: Run, name: str, shape: Shape, latent: LatentShape) -> None:
        self.run, self.latent, self.size, self.heads = run, latent, shape.itemsize, shape.heads // run.tp
        size, method = shape.itemsize, shape.linear

        def linear(part: str, inputs: int, outputs: int, *, reduce: bool = False) -> Linear:
            return Linear(run, f"{name}.{part}", inputs, [outputs], method, size, reduce=reduce)

        self.q_proj = linear("q_proj", shape.hidden, self.heads * (latent.nope + latent.rope))
        self.down = linear("kv_a_proj_with_mqa", shape.hidden, latent.kv_rank + latent.rope)
        run.new(latent.kv_rank * size, f"{name}.kv_a_layernorm.weight")
        self.up = linear("kv_b_proj", latent.kv_rank, self.heads * (latent.nope + latent.value))
        self.o_proj = linear("o_proj", self.heads * latent.value, shape.hidden, reduce=True)
        self.scales = UnpackedScales(run, f"{name}.attn", self.up)
        run.new(_WIDE, f"{name}.one scale", Category.BUFFER)

    def finish(self) -> None:
        """After loading."""
        for linear in (self.q_proj, self.down, self.up, self.o_proj):
            linear.finish()

    def __call__(self, tokens: int) -> Tensor:
        run, row = self.run, tokens * self.size
        held = [self.q_proj(tokens), self.down(tokens), run.new(row * self.latent.kv_rank, "normed keys")]
        attended = run.new(row * self.heads * self.latent.value, "attention output")
        run.free(*held)
        return run.replacing(attended, self.o_proj(tokens))


class Kimi(Decoder):
    """The whole model."""

    def __init__(self, run: Run, shape: Shape) -> None:
        super().__init__(run, shape, Style(holds_gate_up=True))

    def mixing(self, name: str, index: int) -> Mixing:
        shape = self.shape
        assert isinstance(shape.state, DeltaShape)
        assert shape.latent is not None
        if index in shape.attends:
            return PlainLatentAttention(self.run, f"{name}.self_attn", shape, shape.latent)
        return LowRankDeltaNet(self.run, f"{name}.self_attn", shape, shape.state)

    def last(self, tokens: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Their sum, which is normed when logits are made of it."""
        total = self.run.new(hidden.bytes, "sum")
        return total, total

    def logits(self, rows: int) -> Tensor:
        return self.run.replacing(self.norm.plain(rows), super().logits(rows))

    def finish(self) -> None:
        super().finish()
        for index in self.shape.attends:  # inverses of queries' and keys' scales
            for _ in range(2):
                self.run.new(_WIDE, f"model.layers.{index}.self_attn.inverse scale", Category.BUFFER)


def kimi_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes (transformers_utils/configs/kimi_linear.py). Raises :class:`UsageError`."""
    config, own = model.config, mapping(model, "linear_attn_config")
    if other := [name for name in _K3 if config.get(name)] + ["linear_attn_config"] * (not own):
        raise UsageError(f"{model.name}: kimi_linear with {', '.join(other)} {config.get(other[0])!r} is not followed")
    layers, kinds = count(model, "num_hidden_layers"), own.get("kda_layers")
    heads, dim, kernel = (
        counted(model, f"linear_attn_config.{name}", own.get(name))
        for name in ("num_heads", "head_dim", "short_conv_kernel_size")
    )
    latent = LatentShape(0, *(count(model, name) for name in (
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")))  # fmt: skip
    width = count(model, "moe_intermediate_size")
    experts = ExpertShape(
        count(model, "num_experts"), count(model, "num_experts_per_token"), width,
        shared_width=width * count(model, "num_shared_experts", 0, least=0),
        first=count(model, "first_k_dense_replace", 0, least=0), correction_bias=True, grouped=True,
        score_bytes=_WIDE, holds_scores=True, least=_LEAST_WIDTH,
    )  # fmt: skip
    return plain_shape(
        model, itemsize, method, experts=experts, latent=latent, imports_compressed=True,
        positions=count(model, "model_max_length", 4096),
        state=DeltaShape(
            heads, heads, dim, dim, kernel, interleaved=False, conv_bytes=itemsize,
            state_bytes=_WIDE,
        ),
        attends=tuple(layer for layer in range(layers) if not isinstance(kinds, list) or layer + 1 not in kinds),
    )  # fmt: skip
