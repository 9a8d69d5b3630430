"""Gated delta nets beside gated attention: Qwen3-Next and the language models of Qwen3.5 (vllm 0.32.0,
models/{qwen3_next,qwen3_5}.py, layers/mamba/gdn/qwen_gdn_linear_attn.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, number, rope_of
from graphmem.serving.vllm.layers import AttentionScales, Linear, LinearMethod
from graphmem.serving.vllm.models.base import Shape, StateShape, plain_shape
from graphmem.serving.vllm.models.decoder import Decoder, Mixing, Projected, Style
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.sources.vllm_layers import ExpertShape

#: Tokens of the warm-up's one chunk (``FLA_CHUNK_SIZE``, third_party/flash_linear_attention/ops/utils.py).
_CHUNK = 64
#: Widths of heads for which a kernel does all of a step (``_fused_gdn_decode_unsupported_reason``).
_FUSED_DIM = 128
#: A tensor map (``CUtensorMap``), one for each multiprocessor.
_TENSOR_MAP_BYTES = 128
#: Both kinds of configurations: with experts, and whether their tensors are as Qwen3-Next's, interleaved by key heads.
KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
#: What counts the layers that predict further tokens.
_PREDICTS = {"qwen3_next": "num_nextn_predict_layers"}
_STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DeltaShape(StateShape):
    """Heads of keys and of values, their widths, and the convolution's kernel, which remembers drafted tokens beside.
    ``interleaved``: a product has the parts of each key head side by side."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    interleaved: bool

    def shared(self, tp: int) -> DeltaShape:
        return replace(self, key_heads=self.key_heads // tp, value_heads=self.value_heads // tp)

    @property
    def keys(self) -> int:
        """Elements of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def page_bytes(self) -> int:
        kept = (self.kernel - 1 + self.drafted) * self.convolved * self.conv_bytes
        return kept + self.values * self.key_dim * self.state_bytes


class DeltaNet:
    """``QwenGatedDeltaNetAttention``. While the engine profiles nothing is convolved or scanned but one chunk, once for
    each layer, with FlashInfer's kernels for compute capability 9.0."""

    def __init__(self, run: Run, name: str, shape: Shape, state: DeltaShape) -> None:
        self.run, self.name, self.state, self.size = run, name, state.shared(run.tp), shape.itemsize
        self.scales: AttentionScales | None = None
        own, size, method = self.state, shape.itemsize, shape.linear
        run.new(own.convolved * own.kernel * size, f"{name}.conv1d.weight")
        parts = [own.keys, own.keys, own.values, own.values]
        self.qkvz = Linear(
            run, f"{name}.in_proj_qkvz", shape.hidden, [sum(parts)] if own.interleaved else parts, method, size
        )  # fmt: skip
        rates = [2 * own.value_heads] if own.interleaved else [own.value_heads] * 2
        self.rates = Linear(run, f"{name}.in_proj_ba", shape.hidden, rates, method, size)
        run.new(own.value_heads * size, f"{name}.dt_bias")
        run.new(own.value_heads * 4, f"{name}.A_log")
        run.new(own.value_dim * size, f"{name}.norm.weight")
        self.out_proj = Linear(run, f"{name}.out_proj", own.values, [shape.hidden], method, size, reduce=True)
        self._warm = False
        # ``_fused_gdn_decode_unsupported_reason``: where tokens are drafted one kernel convolves, scans and norms;
        # of its conditions the kinds of gates and BF16 are taken to hold.
        dims = own.key_dim == own.value_dim == _FUSED_DIM
        self._fused = own.drafted > 0 and not own.interleaved and dims and size == own.conv_bytes == 2

    def finish(self) -> None:
        """After loading."""
        for linear in (self.qkvz, self.rates, self.out_proj):
            linear.finish()

    def __call__(self, tokens: int) -> Tensor:
        run, own, size = self.run, self.state, self.size
        held = [self.qkvz(tokens), self.rates(tokens)]
        rate = tokens * own.value_heads * size
        run.enter(self.name)
        if own.interleaved:  # values, gates and rates out of their heads, then queries and keys, then side by side
            parts = (tokens * own.values * size, tokens * own.values * size, rate, rate)
            held += [run.new(part) for part in (*parts, tokens * own.keys * size, tokens * own.keys * size)]
            held.append(run.new(tokens * own.convolved * size, "queries, keys and values"))
        held.append(run.new(tokens * own.values * size, "scanned"))
        rates = [] if own.interleaved or self._fused else [run.new(rate) for _ in range(2)]
        self._warm_up()
        run.free(*rates)
        if not self._fused:
            held.append(run.new(tokens * own.values * size, "gated and normed"))
            run.temporary(tokens * own.value_heads * 4)
        return run.replacing(*reversed(held), self.out_proj(tokens))

    def _warm_up(self) -> None:
        """``_warmup_prefill_kernels``: a chunk, its parts, and a state; then FlashInfer's kernel, which takes the state
        in fp32 and leaves workspaces (flashinfer 0.7, gdn_kernels/delta_rule_dsl/delta_rule_cp_sm90.py)."""
        if self._warm:
            return
        self._warm = True
        run, own, size, rate = self.run, self.state, self.size, _CHUNK * self.state.value_heads
        states = own.values * own.key_dim
        sizes = [_CHUNK * own.convolved * size, rate * size, rate * size]
        sizes += [_CHUNK * own.keys * size] * 2 + [_CHUNK * own.values * size, rate * 4, rate * 4]
        made = [run.new(one) for one in (*sizes, states * own.state_bytes, 8)]
        wide = [] if own.state_bytes == 4 else [states * 4]
        within = [run.new(one) for one in (*wide, 16, rate * 4, _CHUNK * own.values * size, states * 4)]
        heads = max(own.key_heads, own.value_heads)
        run.once("tiles of the delta rule", heads * _CHUNK * _CHUNK * size)
        for part in ("transfer", "local state", "fixed state"):
            run.once(f"{part} of the delta rule", heads * own.key_dim * own.key_dim * 4)
        run.once("tensor maps of the delta rule", run.device.sm_count * _TENSOR_MAP_BYTES)
        run.free(*within, *made)
        run.empty_cache()


class PlainDeltaNet:
    """``OlmoHybridGatedDeltaNetAttention``, into a tensor that is made before. Nothing is convolved or scanned while
    the engine profiles. The gate is a part of the projection and copied for the norm."""

    def __init__(self, run: Run, name: str, shape: Shape, state: DeltaShape) -> None:
        self.run, self.name, self.hidden, self.size = run, name, shape.hidden, shape.itemsize
        self.state = own = state.shared(run.tp)
        method, size = shape.linear, shape.itemsize

        def linear(part: str, outputs: list[int]) -> Linear:
            return Linear(run, f"{name}.{part}", shape.hidden, outputs, method, size)

        self.qkvg = linear("in_proj_qkvg", [own.keys, own.keys, own.values, own.values])
        self.rates = [linear(f"{part}_proj", [own.value_heads]) for part in "ba"]
        run.new(own.convolved * own.kernel * size, f"{name}.conv1d.weight")
        for part in ("dt_bias", "A_log"):
            run.new(own.value_heads * size, f"{name}.{part}")
        run.new(own.value_dim * size, f"{name}.o_norm.weight")
        self.o_proj = Linear(run, f"{name}.o_proj", own.values, [shape.hidden], method, size, reduce=True)

    def finish(self) -> None:
        """After loading."""
        for linear in (self.qkvg, *self.rates, self.o_proj):
            linear.finish()

    def __call__(self, tokens: int) -> Tensor:
        """The projected output; the input is the caller's."""
        run, values = self.run, tokens * self.state.values * self.size
        result = run.new(tokens * self.hidden * self.size, "output")
        held = [linear(tokens) for linear in (self.qkvg, *self.rates)]
        run.enter(self.name)
        held += [run.new(values, label) for label in ("scanned", "gates", "gated and normed")]
        run.temporary(tokens * self.state.value_heads * 4)
        run.free(self.o_proj(tokens), *reversed(held))
        return result


class GatedAttention(Projected):
    """Attention whose output is multiplied by a gate that comes with the queries; they and the keys are normed and
    turned in one kernel."""

    def __init__(self, run: Run, name: str, shape: Shape) -> None:
        super().__init__(run, name, shape, bias=shape.attention_bias, gated=True)
        self.make_table()
        self.make_scales()
        for side in "qk":
            run.new(shape.head_dim * shape.itemsize, f"{name}.{side}_norm.weight")

    def __call__(self, tokens: int) -> Tensor:
        run, size = self.run, self.shape.itemsize
        qkv = self.qkv_proj(tokens)
        run.enter(f"{self.name}.attn")
        turned = [run.new(tokens * width * size) for width in (self.q, self.kv, self.q)]
        attended, weight = (run.new(tokens * self.q * size) for _ in range(2))
        gated = run.replacing(weight, attended, run.new(tokens * self.q * size, "gated"))
        return run.replacing(*turned, qkv, gated, self.o_proj(tokens))


class DeltaDecoder(Decoder):
    """The whole model."""

    def __init__(self, run: Run, shape: Shape) -> None:
        super().__init__(run, shape, Style(norm="gemma", holds_gate_up=True))

    def mixing(self, name: str, index: int) -> Mixing:
        assert isinstance(self.shape.state, DeltaShape)
        if index in self.shape.attends:
            return GatedAttention(self.run, f"{name}.self_attn", self.shape)
        return DeltaNet(self.run, f"{name}.linear_attn", self.shape, self.shape.state)


def delta_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes (transformers, ``Qwen3NextConfig`` and ``Qwen3_5TextConfig``)."""
    config, kind = model.config, str(model.config.get("model_type"))
    head_dim, rope = count(model, "head_dim", 256), rope_of(model)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    state = DeltaShape(
        count(model, "linear_num_key_heads", 16), count(model, "linear_num_value_heads", 32),
        count(model, "linear_key_head_dim", 128), count(model, "linear_value_head_dim", 128),
        count(model, "linear_conv_kernel_dim", 4, least=2), interleaved=kind == "qwen3_next",
        conv_bytes=itemsize, state_bytes=_state_bytes(model, kind, itemsize),
    )  # fmt: skip
    return plain_shape(
        model, itemsize, method, head_dim=head_dim,
        intermediate=count(model, "intermediate_size", count(model, "hidden_size")),
        rotary_dim=int(head_dim * min(1.0, number(model, "partial_rotary_factor", partial, 0.25))),
        attention_bias=bool(config.get("qkv_bias")), experts=_experts(model, kind), state=state,
        attends=_attends(model, count(model, "num_hidden_layers")),
        predicts=count(model, _PREDICTS.get(kind, "mtp_num_hidden_layers"), 1, least=0),
    )  # fmt: skip


def _state_bytes(model: ServedModel, kind: str, itemsize: int) -> int:
    """Qwen3.5's configuration names the states' dtype (``Qwen3_5ForConditionalGenerationConfig``, models/config.py)."""
    name = model.config.get("mamba_ssm_dtype")
    if kind == "qwen3_next" or name is None:
        return itemsize
    if name not in _STATE_DTYPES:
        raise UsageError(f"{model.name}: mamba_ssm_dtype is {shown(name)}; accepted: {', '.join(_STATE_DTYPES)}")
    return _STATE_DTYPES[name]


def _attends(model: ServedModel, layers: int) -> tuple[int, ...]:
    kinds = model.config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers and set(kinds) <= {"linear_attention", "full_attention"}:
        return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")
    if kinds is not None:
        raise UsageError(
            f"{model.name}: layer_types are {shown(kinds)}; accepted: linear_attention or full_attention for each layer"
        )
    every = count(model, "full_attention_interval", 4)
    return tuple(range(every - 1, layers, every))


def _experts(model: ServedModel, kind: str) -> ExpertShape | None:
    if kind == "qwen3_5_text" or not model.config.get("num_experts", kind != "qwen3_next" or 512):
        return None
    listed = model.config.get("mlp_only_layers") or []
    return ExpertShape(
        count(model, "num_experts", 512 if kind == "qwen3_next" else 256),
        count(model, "num_experts_per_tok", 10 if kind == "qwen3_next" else 8),
        count(model, "moe_intermediate_size", 512),
        shared_width=count(model, "shared_expert_intermediate_size", 512, least=0),
        every=count(model, "decoder_sparse_step", 1),
        dense_layers=tuple(one for one in listed if type(one) is int) if isinstance(listed, list) else (),
        shared_gate=True,
    )
