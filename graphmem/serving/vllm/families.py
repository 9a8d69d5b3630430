"""From a configuration to a model: which family it is, and its sizes as the engine reads them.

Fields and their defaults are those of transformers' configurations and of vllm 0.32.0, ``config/model.py`` and
``model_executor/models``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphmem.errors import UsageError
from graphmem.serving.vllm.layers import LinearMethod
from graphmem.serving.vllm.models.base import ExpertShape, Family, LatentShape, Shape
from graphmem.serving.vllm.models.decoder import Decoder, Style
from graphmem.serving.vllm.models.opt import OPT
from graphmem.serving.vllm.run import Run

_GEMMA = Style(norm="gemma", holds_gate_up=True, post_norms=True, scales_embedding=True)

#: Families by ``model_type``.
_STYLES: dict[str, Style] = {
    "llama": Style(),
    "mistral": Style(),
    "mixtral": Style(),
    "qwen2": Style(holds_gate_up=True, qkv_bias=True),
    "qwen3": Style(holds_gate_up=True, head_norms=True),
    "qwen3_moe": Style(holds_gate_up=True, head_norms=True),
    "gemma2": Style(norm="gemma", holds_gate_up=True, post_norms=True, scales_embedding=True, soft_cap=True, drops_head=False),
    "gemma3_text": Style(norm="gemma", holds_gate_up=True, post_norms=True, scales_embedding=True, head_norms=True),
}
MODEL_TYPES = ("opt", *_STYLES)


def family(run: Run, shape: Shape) -> Family:
    """The model itself; making it asks for its weights."""
    if shape.kind == "opt":
        return OPT(run, shape)
    return Decoder(run, shape, _STYLES[shape.kind])


def shape_of(config: Mapping[str, Any], itemsize: int, method: LinearMethod) -> Shape:
    kind = config["model_type"]
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // heads
    rotary_dim = int(head_dim * config.get("partial_rotary_factor", 1.0))
    return Shape(
        kind=kind,
        hidden=hidden,
        intermediate=config.get("intermediate_size") or config["ffn_dim"],
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        positions=config["max_position_embeddings"],
        itemsize=itemsize,
        linear=method,
        tied=bool(config.get("tie_word_embeddings", kind in ("opt", "gemma2", "gemma3_text"))),
        windows=_windows(config, layers),
        rope_positions=config["max_position_embeddings"],
        rotary_dim=rotary_dim,
        attention_bias=bool(config.get("attention_bias")),
        output_bias=bool(config.get("attention_bias")) and kind in ("llama", "gemma2"),
        mlp_bias=bool(config.get("mlp_bias")),
    )


def _windows(config, layers):
    if config["model_type"] == "gemma2":
        return tuple(config["sliding_window"] if i % 2 == 0 else None for i in range(layers))
    if config["model_type"] == "gemma3_text":
        p = config.get("sliding_window_pattern", 6)
        return tuple(config["sliding_window"] if (i + 1) % p else None for i in range(layers))
    return (None,) * layers
