"""What layers keep of a token and of a sequence, by a model's configuration, whatever else the model is.

Fields are those of transformers' configurations; states of linear attention are laid out as in Qwen3-Next
(``linear_*``), of which engines cut a share of the heads for each card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import as_object, count, counted, listed

#: Names of fields of layers whose states are not followed here.
_OTHER = (
    "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "linear_attn_config", "attn_type_list",
    "index_topk",
)  # fmt: skip
#: Kinds of layers that are.
_KINDS = ("full_attention", "sliding_attention", "linear_attention", "attention", "chunked_attention")
#: What a language model has from the configuration around it.
_INHERITED = ("architectures", "torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
_STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Cached:
    """Of one card's layers: ``values`` of a token in those that see all together, ``windowed`` in those that see a
    window, and bytes of a sequence's ``states``."""

    values: int
    windowed: int
    states: int


def language(model: ServedModel) -> ServedModel:
    """The language model within one that has encoders too; others as they are."""
    text = as_object(model.config.get("text_config"))
    if not text or "hidden_size" in model.config:
        return model
    inherited = {name: model.config[name] for name in _INHERITED if name in model.config}
    return replace(model, config={**inherited, **text}, around=model)


def cached(model: ServedModel, cards: int) -> Cached:
    """One card's share under tensor parallelism. Raises :class:`UsageError` for layers that keep something else, and
    for cards that do not divide the heads."""
    config, layers = model.config, count(model, "num_hidden_layers")
    if other := [name for name in _OTHER if config.get(name)]:
        raise UsageError(f"{model.name}: what its layers keep is not followed here ({other[0]})")
    heads = count(model, "num_attention_heads")
    kv_heads = count(model, "num_key_value_heads", heads)
    if cards < 1 or heads % cards or (kv_heads % cards and cards % kv_heads):
        raise UsageError(f"{heads} heads and {kv_heads} of keys cannot be shared by {cards} cards")
    if config.get("kv_lora_rank"):  # one latent vector for all heads, on every card
        return Cached(layers * (count(model, "kv_lora_rank") + count(model, "qk_rope_head_dim")), 0, 0)
    kinds = _kinds(model, layers)
    wide = count(model, "head_dim", max(1, count(model, "hidden_size") // heads))
    near = 2 * max(1, kv_heads // cards) * wide
    every = 2 * max(1, count(model, "num_global_key_value_heads", kv_heads) // cards)
    every *= count(model, "global_head_dim", wide)
    states = kinds.count("linear_attention")
    return Cached(
        (layers - states - kinds.count("sliding_attention")) * every,
        kinds.count("sliding_attention") * near,
        states * _state(model, cards) if states else 0,
    )


def _kinds(model: ServedModel, layers: int) -> list[object]:
    """The layers' kinds; those that see all have any other name."""
    if types := listed(model, "layer_types"):
        if others := [one for one in types if one not in _KINDS]:
            raise UsageError(f"{model.name}: layers of {shown(others[0])} are not followed here")
        return types[:layers]
    if "linear_num_value_heads" in model.config:
        interval = count(model, "full_attention_interval", 4)
        return ["full_attention" if layer % interval == interval - 1 else "linear_attention" for layer in range(layers)]
    if model.config.get("model_type") == "gemma4_text":  # one of six (Gemma4TextConfig)
        return ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    return []


def _state(model: ServedModel, cards: int) -> int:
    """Bytes of a sequence in one layer: the convolution's last inputs in 16 bits, and the state."""
    keys, values = (count(model, f"linear_num_{part}_heads") for part in ("key", "value"))
    wide, value = (count(model, f"linear_{part}_head_dim") for part in ("key", "value"))
    if keys % cards or values % cards:
        raise UsageError(f"{keys} heads of linear attention cannot be shared by {cards} cards")
    dtype = model.config.get("mamba_ssm_dtype")
    convolved = (2 * keys * wide + values * value) // cards
    kept = counted(model, "linear_conv_kernel_dim", model.config.get("linear_conv_kernel_dim"), 4) - 1
    return 2 * convolved * kept + values // cards * value * wide * _STATE_DTYPES.get(str(dtype), 4)


def token_values(config: Mapping[str, object], cards: int) -> int | None:
    """Values that all layers together keep of a token; None where a window or a state makes it none number."""
    try:
        found = cached(language(ServedModel("", config)), cards)
    except UsageError:
        return None
    return found.values if found.values and not found.windowed + found.states else None
