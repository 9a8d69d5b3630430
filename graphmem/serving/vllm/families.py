"""From a configuration to a model: which family it is, and its sizes as the engine reads them.

Fields and their defaults are those of transformers' configurations and of vllm 0.32.0, ``config/model.py`` and
``model_executor/models``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphmem.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.vllm.layers import LinearMethod
from graphmem.serving.vllm.models.base import ExpertShape, Family, LatentShape, Shape
from graphmem.serving.vllm.models.decoder import Decoder, Style
from graphmem.serving.vllm.models.opt import OPT
from graphmem.serving.vllm.run import Run

_GEMMA = Style(norm="gemma", holds_gate_up=True, post_norms=True, scales_embedding=True)

#: Families of :class:`Decoder` by ``model_type``.
_STYLES: dict[str, Style] = {
    "llama": Style(),
    "mistral": Style(),
    "qwen2": Style(holds_gate_up=True, qkv_bias=True),
    "qwen3": Style(holds_gate_up=True, head_norms=True),
    "mixtral": Style(),
    "qwen3_moe": Style(holds_gate_up=True, head_norms=True),
    "deepseek_v2": Style(holds_gate_up=True),
    "deepseek_v3": Style(holds_gate_up=True),
    "gemma2": Style(
        norm="gemma",
        holds_gate_up=True,
        post_norms=True,
        scales_embedding=True,
        soft_cap=True,
        makes_tied_head=False,
    ),
    "gemma3_text": Style(norm="gemma", holds_gate_up=True, post_norms=True, scales_embedding=True, head_norms=True),
}
#: Every ``model_type`` that is followed.
MODEL_TYPES = (*_STYLES, "opt")
#: ``model_type`` whose embeddings are tied where the configuration does not say (transformers' defaults).
_TIED = ("gemma2", "gemma3_text", "opt")
#: Layers between those that attend to everything (transformers, Gemma2Config and Gemma3TextConfig).
_WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6}
#: ``model_type`` with latent attention.
_LATENT = ("deepseek_v2", "deepseek_v3")
#: Kinds of stretched rotary tables that are multiplied by a factor of their own.
_MULTIPLIED = ("yarn", "deepseek_yarn")
#: More would be a configuration of something else.
_MOST = {"num_hidden_layers": 1 << 12}
_LARGEST = 1 << 31


def family(run: Run, shape: Shape) -> Family:
    """The model itself; making it asks for its weights."""
    if shape.kind == "opt":
        return OPT(run, shape)
    return Decoder(run, shape, _STYLES[shape.kind])


def shape_of(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """The sizes of the model. Raises :class:`UsageError` for a family that is not followed, and for what is missing."""
    config = model.config
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UsageError(
            f"{model.name}: model_type {shown(kind)} is not followed in vLLM yet; accepted: {', '.join(MODEL_TYPES)}"
        )
    hidden, heads, layers = (
        _count(model, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = _count(model, "num_key_value_heads", heads)
    head_dim = _count(model, "head_dim", hidden // heads)
    positions = _count(model, "max_position_embeddings")
    if kind == "opt" and config.get("word_embed_proj_dim", hidden) != hidden:
        raise UsageError(f"{model.name}: OPT with projected embeddings is not followed")
    rope = _rope(config)
    latent = _latent(model) if kind in _LATENT else None
    return Shape(
        kind=kind,
        hidden=hidden,
        intermediate=_count(model, "ffn_dim" if kind == "opt" else "intermediate_size"),
        experts=_experts(model, kind),
        latent=latent,
        rope_scaled=rope.get("rope_type", rope.get("type")) in _MULTIPLIED,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_count(model, "vocab_size"),
        positions=positions,
        itemsize=itemsize,
        linear=method,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        windows=_windows(model, kind, layers),
        rope_positions=_rope_positions(rope, positions),
        rotary_dim=int(head_dim * float(config.get("partial_rotary_factor") or 1.0)),
        ropes=_ropes(config, kind, layers),
        attention_bias=bool(config.get("attention_bias")),
        output_bias=bool(config.get("attention_bias")) and kind not in ("qwen2", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias")),
    )


def notes(shape: Shape, eager: bool) -> tuple[str, ...]:
    """What a reader is told of how far this family is followed."""
    told = []
    if not eager and (shape.kind == "opt" or shape.latent is not None):
        told.append(f"what torch.compile makes of {shape.kind} is not followed: activations are taken as in eager mode")
    elif not eager and (shape.kind in _WINDOW_PATTERN or shape.experts is not None):
        told.append(f"the compiled pieces of {shape.kind} are taken to be like Llama's")
    if shape.experts is not None:
        told.append("experts run on Triton's kernels; FlashInfer's and DeepGEMM's take other scratch")
    return tuple(told)


def _experts(model: ServedModel, kind: str) -> ExpertShape | None:
    config = model.config
    if kind == "mixtral":
        count, chosen = _count(model, "num_local_experts"), _count(model, "num_experts_per_tok")
        return ExpertShape(count, chosen, _count(model, "intermediate_size"))
    if kind == "qwen3_moe":
        return ExpertShape(
            _count(model, "num_experts"),
            _count(model, "num_experts_per_tok"),
            _count(model, "moe_intermediate_size"),
            every=_count(model, "decoder_sparse_step", 1),
            dense_layers=tuple(config.get("mlp_only_layers") or ()),
        )
    if kind in _LATENT and config.get("n_routed_experts"):
        width = _count(model, "moe_intermediate_size")
        return ExpertShape(
            _count(model, "n_routed_experts"),
            _count(model, "num_experts_per_tok"),
            width,
            shared_width=width * int(config.get("n_shared_experts") or 0),
            first=int(config.get("first_k_dense_replace") or 0),
            correction_bias=config.get("topk_method") == "noaux_tc",
        )
    return None


def _latent(model: ServedModel) -> LatentShape:
    if "index_topk" in model.config:
        raise UsageError(f"{model.name}: sparse latent attention (index_topk) is not followed")
    return LatentShape(
        q_rank=_count(model, "q_lora_rank", 0),
        kv_rank=_count(model, "kv_lora_rank"),
        nope=_count(model, "qk_nope_head_dim"),
        rope=_count(model, "qk_rope_head_dim"),
        value=_count(model, "v_head_dim"),
    )


def _count(model: ServedModel, name: str, otherwise: int | None = None) -> int:
    value = model.config.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or not 1 <= value <= _MOST.get(name, _LARGEST):
        raise UsageError(f"{model.name}: {name} is {shown(value)}; accepted: a whole number from 1 on")
    return value


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope if isinstance(rope, Mapping) else {}


def _rope_positions(rope: Mapping[str, Any], positions: int) -> int:
    """Rows of the rotary tables: stretched ones have more (layers/rotary_embedding)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor", 1)
    if kind in ("linear", "dynamic") and isinstance(factor, (int, float)):
        return int(positions * factor)
    if kind in ("yarn", "deepseek_yarn") and isinstance(factor, (int, float)):
        return int(rope.get("original_max_position_embeddings", positions) * factor)
    return positions


def _ropes(config: Mapping[str, Any], kind: str, layers: int) -> tuple[object, ...]:
    """What tells the rotary tables of layers apart: Gemma 3 has one for its windows."""
    if kind != "gemma3_text":
        return (None,)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _WINDOW_PATTERN[kind]
    return tuple("global" if (index + 1) % pattern == 0 else "local" for index in range(layers))


def _windows(model: ServedModel, kind: str, layers: int) -> tuple[int | None, ...]:
    """The window of every layer, None for those that attend to everything."""
    config = model.config
    window = config.get("sliding_window")
    if not isinstance(window, int) or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return (None,) * layers
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if one == "sliding_attention" else None for one in types)
    if kind in _WINDOW_PATTERN:
        pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERN[kind]
        return tuple(None if (index + 1) % pattern == 0 else window for index in range(layers))
    if kind.startswith("qwen"):
        first = config.get("max_window_layers", layers)
        return tuple(window if index >= first else None for index in range(layers))
    return (window,) * layers
