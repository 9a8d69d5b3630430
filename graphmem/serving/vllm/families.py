"""From a configuration to a model: which family it is, and its sizes as the engine reads them.

Fields and their defaults are those of transformers' configurations and of vllm 0.32.0, ``config/model.py`` and
``model_executor/models``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from graphmem.base.documents import shown
from graphmem.base.versions import Version
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import LONG_ROPE, YARN, count, counted, listed, number, rope_of
from graphmem.serving.vllm import versions
from graphmem.serving.vllm.layers import LinearMethod
from graphmem.serving.vllm.models import deltanet, kimi, mamba, mamba1, whisper
from graphmem.serving.vllm.models.base import LOCAL_ROPE, Family, LatentShape, Shape, plain_shape
from graphmem.serving.vllm.models.captured import Captured
from graphmem.serving.vllm.models.decoder import Decoder, Style
from graphmem.serving.vllm.models.opt import OPT
from graphmem.serving.vllm.models.sliced import SlicedDecoder
from graphmem.serving.vllm.run import Run
from graphmem.sources.vllm_layers import ExpertShape

#: Families of :class:`Decoder` by ``model_type``.
_STYLES: dict[str, Style] = {
    "llama": Style(quantises_activation=True),
    "mistral": Style(adapts_tables=False),
    "qwen2": Style(holds_gate_up=True, qkv_bias=True, adapts_tables=False),
    "qwen3": Style(holds_gate_up=True, head_norms=True),
    "mixtral": Style(),
    "phi3": Style(fused=True),
    "gemma": Style(norm="gemma", holds_gate_up=True, scales_embedding=True, makes_tied_head=False, adapts_tables=False),
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
        adapts_tables=False,
    ),
    "glm4": Style(post_norms=True, adapts_tables=False),
    "gemma3_text": Style(
        norm="gemma", holds_gate_up=True, post_norms=True, scales_embedding=True, head_norms=True, adapts_tables=False
    ),
}
#: Families in files of their own: what reads their sizes, and what they are.
_OWN: dict[str, tuple[Callable[[ServedModel, int, LinearMethod], Shape], Callable[[Run, Shape], Family]]] = {
    "mamba2": (mamba.mamba2_shape, mamba.Mamba2),
    **dict.fromkeys(("mamba", "falcon_mamba"), (mamba1.mamba_shape, mamba1.Mamba)),
    "jamba": (mamba1.jamba_shape, mamba1.Jamba),
    whisper.KIND: (whisper.whisper_shape, whisper.Whisper),
    "kimi_linear": (kimi.kimi_shape, kimi.Kimi),
    **dict.fromkeys(deltanet.KINDS, (deltanet.delta_shape, deltanet.DeltaDecoder)),
}
#: Every ``model_type`` that is followed.
MODEL_TYPES = (*_STYLES, "opt", *_OWN)
#: ``model_type`` whose embeddings are tied where the configuration does not say (transformers' defaults).
_TIED = ("gemma", "gemma2", "gemma3_text", "opt")
#: Layers between those that attend to everything (transformers, Gemma2Config and Gemma3TextConfig).
_WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6}
#: Rows of rotary tables of several positions a token, for each of the model's (``positions_factor``, mrope.py).
MROPE_ROWS = 4
#: ``model_type`` whose tables are so long; Qwen3-VL's are only where videos are pruned (``mrope_positions_factor``).
_LONGER_ROPES = ("qwen2", "glm4")
#: ``model_type`` with latent attention.
_LATENT = ("deepseek_v2", "deepseek_v3")
#: Experts whose tokens tensor parallel ranks slice where replicas gather them (``is_sequence_parallel``).
SLICED = ("qwen3_moe", *_LATENT)
#: Those that stay in slices between layers then, and are not followed (``use_sequence_parallel_moe`` of their layers).
SLICED_BETWEEN_LAYERS = (*deltanet.KINDS, "kimi_linear")
#: Bytes of an element in fp32, and labels where a configuration has none (transformers).
_WIDE, _LABELS = 4, 2
#: The part of a head that is turned where nobody says (transformers' defaults).
_TURNED = {"glm4": 0.5}


def family(run: Run, shape: Shape) -> Family:
    """The model itself; making it asks for its weights."""
    if shape.backend is not None:
        return Captured(run, shape)
    if shape.kind in _OWN:
        return _OWN[shape.kind][1](run, shape)
    if shape.kind == "opt":
        return OPT(run, shape)
    if shape.kind in _LATENT and run.experts.sliced:
        return SlicedDecoder(run, shape, _STYLES[shape.kind])
    return Decoder(run, shape, _STYLES[shape.kind])


def style_of(model: ServedModel, shape: Shape) -> Style:
    """The differences of a decoder from Llama. Raises :class:`UsageError` for a model that is no such decoder."""
    if shape.kind not in _STYLES or shape.experts is not None or shape.latent is not None:
        raise UsageError(f"{model.name}: a draft of model_type {shape.kind} is not followed; accepted: dense decoders")
    return _STYLES[shape.kind]


def prediction(target: Shape, tokens: int) -> Shape:
    """The sizes of the layers that predict so many tokens. Raises :class:`UsageError` where the model has none."""
    layers = target.predicts
    if target.kind not in (*deltanet.KINDS, "deepseek_v3") or not layers:
        raise UsageError(
            f"speculative_config of method mtp: {target.kind} has no layers of multi-token prediction that are "
            f"followed (num_nextn_predict_layers); accepted: deepseek_v3, {', '.join(deltanet.KINDS)}"
        )
    if tokens > layers and tokens % layers:
        raise UsageError(f"num_speculative_tokens:{tokens} must be divisible by n_predict={layers}")
    experts = None if target.experts is None else replace(target.experts, first=0, dense_layers=())
    return replace(
        target, layers=layers, windows=(None,) * layers, state=None, attends=(), stage=None, experts=experts
    )  # fmt: skip


def checked_kind(model: ServedModel) -> str:
    """Its ``model_type``. Raises :class:`UsageError` for a family that is not followed."""
    kind = model.config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise UsageError(
            f"{model.name}: model_type {shown(kind)} is not followed in vLLM yet; accepted: {', '.join(MODEL_TYPES)}"
        )
    return kind


def shape_of(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """The sizes of the model. Raises :class:`UsageError` for a family that is not followed, and for a missing value."""
    config, kind = model.config, checked_kind(model)
    if kind in _OWN:
        return _OWN[kind][0](model, itemsize, method)
    hidden, heads, layers = (count(model, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = counted(model, "head_dim", config.get("head_dim") or hidden // heads)
    if kind == "opt" and config.get("word_embed_proj_dim", hidden) != hidden:
        raise UsageError(f"{model.name}: OPT with projected embeddings is not followed")
    rope = rope_of(model)
    return plain_shape(
        model,
        itemsize,
        method,
        intermediate=count(model, "ffn_dim" if kind == "opt" else "intermediate_size"),
        experts=_experts(model, kind),
        latent=latent_of(model) if kind in _LATENT else None,
        rope_linear=is_linear(rope),
        rope_scaled=is_multiplied(rope),
        rope_short=_short(model, rope),
        head_dim=head_dim,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        windows=_windows(model, kind, layers),
        rope_positions=rope_positions(model, rope, count(model, "max_position_embeddings")),
        rotary_dim=_turned(model, kind, rope, head_dim),
        ropes=_ropes(model, kind, layers),
        output_bias=bool(config.get("attention_bias")) and kind not in ("qwen2", "qwen3", "glm4"),
        mlp_bias=bool(config.get("mlp_bias")),
        predicts=count(model, "num_nextn_predict_layers", 0, least=0) if kind == "deepseek_v3" else 0,
    )


def _turned(model: ServedModel, kind: str, rope: Mapping[str, object], head_dim: int) -> int:
    """The width of a head's part that is turned."""
    name = "partial_rotary_factor"
    return int(head_dim * min(1.0, number(model, name, rope.get(name, model.config.get(name)), _TURNED.get(kind, 1.0))))


def notes(shape: Shape, eager: bool) -> tuple[str, ...]:
    """Notes for the reader on the parts of this family that are followed."""
    found = []
    if not eager and (shape.kind == "opt" or shape.latent is not None or shape.state is not None):
        found.append(
            f"what torch.compile makes of {shape.kind} is not followed: activations are taken as in eager mode"
        )
    elif not eager and (shape.kind in _WINDOW_PATTERN or (shape.experts is not None and shape.kind != "qwen3_moe")):
        found.append(f"the compiled pieces of {shape.kind} are taken to be like Llama's, or like Qwen 3's with experts")
    if not eager and shape.latent is not None:
        found.append("what latent attention takes while graphs are captured is not followed: it is taken as nothing")
    if shape.experts is not None:
        found.append("experts run on Triton's kernels; FlashInfer's and DeepGEMM's take other scratch")
    return tuple(found)


def _experts(model: ServedModel, kind: str) -> ExpertShape | None:
    config = model.config
    if kind == "mixtral":
        return ExpertShape(
            count(model, "num_local_experts"),
            count(model, "num_experts_per_tok"),
            count(model, "intermediate_size"),
            holds_scores=True,
        )
    if kind == "qwen3_moe":
        return ExpertShape(
            count(model, "num_experts"),
            count(model, "num_experts_per_tok"),
            count(model, "moe_intermediate_size"),
            every=count(model, "decoder_sparse_step", 1),
            dense_layers=tuple(one for one in listed(model, "mlp_only_layers") if type(one) is int),
        )
    if kind in _LATENT and config.get("n_routed_experts"):
        width = count(model, "moe_intermediate_size")
        return ExpertShape(
            count(model, "n_routed_experts"),
            count(model, "num_experts_per_tok"),
            width,
            shared_width=width * count(model, "n_shared_experts", 0, least=0),
            first=count(model, "first_k_dense_replace", 0, least=0),
            correction_bias=config.get("topk_method") == "noaux_tc",
            grouped=True,
        )
    return None


def latent_of(model: ServedModel) -> LatentShape:
    """Its latent attention. Raises :class:`UsageError`."""
    if "index_topk" in model.config:
        raise UsageError(f"{model.name}: sparse latent attention (index_topk) is not followed")
    return LatentShape(
        q_rank=count(model, "q_lora_rank", 0, least=0),
        kv_rank=count(model, "kv_lora_rank"),
        nope=count(model, "qk_nope_head_dim"),
        rope=count(model, "qk_rope_head_dim"),
        value=count(model, "v_head_dim"),
    )


def pooled_head(model: ServedModel) -> tuple[int, ...]:
    """Bytes of the parameters that its class has behind a model that pools, in fp32 (``head_dtype``, config/model.py):
    a score of every label (``as_seq_cls_model``, models/adapters.py), behind a layer as wide as the model in reward
    models (models/qwen2_rm.py)."""
    named = str((listed(model, "architectures") or [""])[0])
    hidden, labels = count(model, "hidden_size"), model.config.get("id2label")
    of_tokens = bool(model.config.get("classifier_from_token"))  # the share of one of two (models/adapters.py)
    known = 1 if of_tokens else len(labels) if isinstance(labels, Mapping) else _LABELS
    score = hidden * count(model, "num_labels", known)
    if named.endswith("RewardModel"):
        return (hidden * hidden * _WIDE, hidden * _WIDE, score * _WIDE, score // hidden * _WIDE)
    return (score * _WIDE,) if named.endswith("ForSequenceClassification") else ()


def is_linear(rope: Mapping[str, object]) -> bool:
    """True if positions are divided."""
    return rope.get("rope_type", rope.get("type")) == "linear"


def is_multiplied(rope: Mapping[str, object]) -> bool:
    """True if the table is multiplied by a factor of its own."""
    return rope.get("rope_type", rope.get("type")) in YARN


def rope_positions(model: ServedModel, rope: Mapping[str, object], positions: int) -> int:
    """Rows of the rotary tables: stretched ones have more (layers/rotary_embedding)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = number(model, "factor of rope_scaling", rope.get("factor"), 1.0)
    if kind in ("linear", "dynamic"):
        return _limited(model, positions * factor)
    if kind in LONG_ROPE:
        return _limited(model, positions + _short(model, rope))
    if kind in YARN:
        name = "original_max_position_embeddings"
        return _limited(model, counted(model, name, rope.get(name), positions) * factor)
    return positions


def _short(model: ServedModel, rope: Mapping[str, object]) -> int:
    """Rows of the part of a rotary table that short texts have; 0 where there is one table for all."""
    if rope.get("rope_type", rope.get("type")) not in LONG_ROPE:
        return 0
    name = "original_max_position_embeddings"
    return counted(model, name, rope.get(name, model.config.get(name)), count(model, "max_position_embeddings"))


def with_mrope(shape: Shape, model: ServedModel, version: Version) -> Shape:
    """The same with the rotary tables of several positions a token, where it has them."""
    longer = model.config.get("model_type") in _LONGER_ROPES or not versions.MROPE_BY_MODEL.holds(version)
    if "mrope_section" not in rope_of(model) or not longer:
        return shape
    return replace(shape, rope_positions=shape.rope_positions * MROPE_ROWS)


def _limited(model: ServedModel, positions: float) -> int:
    return counted(model, "positions of rotary tables", int(positions))


def _pattern(model: ServedModel, kind: str) -> int:
    own = model.config.get("sliding_window_pattern") or model.config.get("_sliding_window_pattern")
    return counted(model, "sliding_window_pattern", own, _WINDOW_PATTERN[kind])


def _ropes(model: ServedModel, kind: str, layers: int) -> tuple[object, ...]:
    """Keys that are equal for layers with the same rotary table: Gemma 3 has one for its windows."""
    if kind != "gemma3_text":
        return (None,)
    pattern = _pattern(model, kind)
    return tuple("global" if (index + 1) % pattern == 0 else LOCAL_ROPE for index in range(layers))


def _windows(model: ServedModel, kind: str, layers: int) -> tuple[int | None, ...]:
    """The window of every layer, None for those that attend to everything."""
    config = model.config
    window = config.get("sliding_window")
    if type(window) is not int or window < 1 or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return (None,) * layers
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if one == "sliding_attention" else None for one in types)
    if kind in _WINDOW_PATTERN:
        pattern = _pattern(model, kind)
        return tuple(None if (index + 1) % pattern == 0 else window for index in range(layers))
    if kind.startswith("qwen"):
        first = count(model, "max_window_layers", layers, least=0)
        return tuple(window if index >= first else None for index in range(layers))
    return (window,) * layers
