"""Models that take images: their language model, and the encoder before it.

Followed from vllm 0.32.0. One family is one module with ``tokens_of`` and ``encoder``; :data:`_FAMILIES` names them by
``model_type`` of the configuration around the language model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from graphmem.base.documents import shown as quoted
from graphmem.errors import SourceError, UsageError
from graphmem.serving.base import Question, ServedModel
from graphmem.serving.values import counted, mapping, rope_of
from graphmem.serving.vllm import arguments, versions
from graphmem.serving.vllm.arguments import Arguments
from graphmem.serving.vllm.encoders import glm, internvl, llava, qwen, whisper
from graphmem.serving.vllm.encoders.budget import Pictured, limits_of, profiled
from graphmem.serving.vllm.models import whisper as decoder
from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.settings import Settings
from graphmem.sources.configurations import read


@dataclass(frozen=True)
class _Family:
    """``text``: the language model's ``model_type`` where its own configuration names none that is known; ``varied``:
    the processor's file limits the size of items; ``tied``: the default of transformers' configuration for its
    embeddings; ``processor``: values of the processor that are followed; ``encoders``: their ``model_type``, where the
    family has several; ``within``: where the encoder's configuration is, empty for beside the others; ``most``: items
    of each modality; ``names``: of the language model's sizes, where they are others; ``imports_compressed``: as in
    :class:`graphmem.serving.vllm.models.base.Shape`."""

    module: ModuleType
    modalities: tuple[str, ...]
    text: str
    varied: bool = False
    tied: bool = False
    processor: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()
    within: str = "vision_config"
    most: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    imports_compressed: bool = False


_PIXELS = ("min_pixels", "max_pixels", "size")
_FAMILIES: dict[str, _Family] = {
    "qwen2_vl": _Family(qwen, ("image", "video"), "qwen2", varied=True, processor=_PIXELS),
    "qwen2_5_vl": _Family(qwen, ("image", "video"), "qwen2", varied=True, processor=_PIXELS),
    "qwen3_vl": _Family(qwen, ("image", "video"), "qwen3", varied=True, processor=_PIXELS),
    "qwen3_vl_moe": _Family(qwen, ("image", "video"), "qwen3_moe", varied=True, processor=_PIXELS),
    "qwen3_5": _Family(qwen, ("image", "video"), "qwen3_5_text", varied=True, processor=_PIXELS),
    "qwen3_5_moe": _Family(qwen, ("image", "video"), "qwen3_5_moe_text", varied=True, processor=_PIXELS),
    "glm4v": _Family(glm, ("image", "video"), "glm4", varied=True, processor=_PIXELS, imports_compressed=True),
    "glm4v_moe": _Family(glm, ("image", "video"), "glm4_moe", varied=True, processor=_PIXELS, imports_compressed=True),
    "whisper": _Family(whisper, ("audio",), decoder.KIND, within="", most=1, names=decoder.NAMES),
    "internvl": _Family(
        internvl, ("image", "video"), "qwen2", processor=("crop_to_patches", "max_patches", "min_patches")
    ),
    "llava_next": _Family(llava, ("image",), "llama", encoders=(llava.CLIP, llava.SIGLIP)),
    "llava": _Family(llava, ("image",), "llama", encoders=(llava.CLIP, llava.SIGLIP, llava.PIXTRAL)),
    "gemma3": _Family(llava, ("image",), "gemma3_text", tied=True, encoders=(llava.SIGLIP,)),
    "mistral3": _Family(
        llava, ("image",), "mistral", varied=True, tied=True, processor=("size",), encoders=(llava.PIXTRAL,)
    ),
}
#: Values of a processor that change nothing here: how many frames of a video are taken is the request's.
_OF_REQUESTS = ("fps", "num_frames", "do_sample_frames")
#: ``model_type`` of language models within others that are those of another name.
_SAME = {
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
#: What transformers' configurations of language models have where nothing is said.
_TEXT: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "vocab_size": 262208,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
#: What a language model has from the configuration around it.
_INHERITED = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
#: The file of how images are prepared, beside the configuration.
PREPROCESSOR = "preprocessor_config.json"


def language_model(question: Question, followed: tuple[str, ...]) -> Question:
    """The question of the language model within one that takes images; others as they are. ``followed``: every
    ``model_type`` of a language model that is. Raises :class:`UsageError` for an encoder that is not followed, where it
    may be asked for."""
    model = question.model
    text, kind = model.config.get("text_config"), model.config.get("model_type")
    family = _FAMILIES.get(str(kind))
    if kind in followed or (family is None and not isinstance(text, Mapping)):
        return question
    own = dict(text) if isinstance(text, Mapping) else _flat(model)
    own |= {name: own[other] for name, other in (family.names if family else {}).items() if other in own}
    own_kind = own.get("model_type", family.text if family else kind)
    own["model_type"] = _SAME.get(str(own_kind), family.text if family and own_kind == kind else own_kind)
    inherited = {name: model.config[name] for name in _INHERITED if name in model.config}
    defaults = _TEXT.get(str(own["model_type"]), {}) if family else {}
    values = {**defaults, **inherited, **own}
    if family is not None:
        values["tie_word_embeddings"] = _tied(model, family)
    inner = ServedModel(model.name, values, model.checkpoint, model.path, around=model)
    if family is None and not _text_only(question):
        more = "images" if "vision_config" in model.config or "audio_config" not in model.config else "sound"
        raise UsageError(
            f"{model.name} takes {more}, and what its encoder takes in the profile run is not followed "
            f"(model_type {quoted(kind)}; accepted: {', '.join(_FAMILIES)}); it is as a language model: "
            "--language-model-only"
        )
    return question.with_(model=inner)


def _tied(model: ServedModel, family: _Family) -> bool:
    """The whole model's word counts (``with_hf_config``, config/vllm.py), unless its checkpoint has a head of its own
    (``maybe_untie_word_embeddings``, config/model.py)."""
    if model.checkpoint is not None and model.checkpoint.has_head:
        return False
    return bool(model.config.get("tie_word_embeddings", family.tied))


def _flat(model: ServedModel) -> dict[str, object]:
    """A configuration that has the language model's values beside the encoder's."""
    return {name: value for name, value in model.config.items() if name not in ("vision_config", "architectures")}


def _text_only(question: Question) -> bool:
    """True if nothing but text may come, by the options alone."""
    more = arguments.read(question.arguments)
    return more.text_only or json.loads(more.items_per_prompt).get("image") == 0


def with_encoder(shape: Shape, question: Question, settings: Settings) -> Shape:
    """The shape with its encoder, where the model has one that may be used. Raises :class:`UsageError`."""
    model = question.model
    sections = rope_of(model).get("mrope_section")
    if isinstance(sections, list):
        shape = replace(shape, position_rows=len(sections))
    around, more = model.around, settings.more
    family = _FAMILIES.get(str(around.config.get("model_type"))) if around is not None else None
    if family is not None and family.imports_compressed:
        shape = replace(shape, imports_compressed=True)
    if around is None or family is None or more.text_only:
        return shape
    limits = limits_of(json.loads(more.items_per_prompt), family.modalities, family.most)
    if not any(limits.values()):
        return shape
    if not question.device.limits.bfloat16:  # TORCH_SDPA (platforms/cuda.py, ``get_supported_vit_attn_backends``)
        raise UsageError(
            f"{model.name}: encoders on cards below compute capability 8.0, as {question.device.name} is, are not "
            "followed; the language model alone is: --language-model-only"
        )
    _check(around, question, settings)
    vision = _vision(around, family)
    asked = Pictured(_outer(around, model), vision, _processor(around, family, more), settings.batch.length)
    tokens = family.module.tokens_of(asked, limits)
    embedded, video = dict(tokens), None
    spreads = versions.spreads_embeddings(settings.version)
    new = asked.kind in qwen.NEW
    if spreads and new:
        video, embedded["video"], tokens["video"] = qwen.stamped(asked)
    for name, tokens_of_item in tokens.items():
        counted(around, f"tokens of the largest {name}", tokens_of_item)
    items = profiled(tokens, limits, settings.batch)
    assert items is not None
    if spreads:  # 0.11: into rows of the whole budget, 0.12: of one item's tokens
        rows = items.cache if settings.version < (0, 12) else items.tokens
        items = replace(items, spread=rows, embedded=embedded[items.modality])
    made = family.module.encoder(asked, items, settings.itemsize)
    if isinstance(made, qwen.Qwen):
        on_card = versions.NEW_PIXELS_ON_CARD if new else versions.PIXELS_ON_CARD
        made = replace(
            made,
            # others have no such mode, and fall back (``supports_encoder_tp_data``)
            by_items=more.encoder_data_parallel and settings.tensor_parallel > 1,
            grid=video if video is not None and items.modality == "video" else made.grid,
            normalises=on_card.holds(settings.version),
        )
    quantised = question.quantization is not None and not mapping(around, "quantization_config")
    return replace(shape, encoder=made, encoder_linear=shape.linear if quantised else None)


def shown(shape: Shape, settings: Settings) -> dict[str, Any]:
    """Options of the encoder, by the engine's own names."""
    if shape.encoder is None:
        return {}
    processor, skipped = json.loads(settings.more.processor), settings.more.skip_mm_profiling
    return {
        "limit_mm_per_prompt": dict(shape.encoder.items.limits),
        **({"mm_processor_kwargs": processor} if processor else {}),
        **({"skip_mm_profiling": True} if skipped else {}),
    }


def peak_of(shape: Shape, settings: Settings) -> str:
    """The content of the profile run, in words."""
    step = f"{settings.batch.tokens} tokens, and logits of the sampled rows"
    if shape.encoder is None or settings.more.skip_mm_profiling:
        return step
    return f"{shape.encoder.items}, or a step of {settings.batch.tokens}"


def notes(shape: Shape, model: ServedModel, settings: Settings) -> tuple[str, ...]:
    """Notes on the encoder for the reader."""
    if shape.encoder is None or model.around is None:
        return ()
    items = shape.encoder.items
    found = [
        f"the encoder is profiled with {items}; encoder cache: {items.cache:,} tokens"
        if not settings.more.skip_mm_profiling
        else "the encoder is not profiled (--skip-mm-profiling): what it takes with images is not kept free"
    ]
    family = _FAMILIES[str(model.around.config["model_type"])]
    if family.varied and (model.path is None or not (model.path.parent / PREPROCESSOR).is_file()):
        found.append(
            f"there is no {PREPROCESSOR} beside the configuration: sizes of images are those usually published"
        )
    return tuple(found)


def _outer(around: ServedModel, model: ServedModel) -> ServedModel:
    """The whole model's configuration, with the values of its language model."""
    width = {"hidden_size": model.config.get("hidden_size")}
    return ServedModel(around.name, {**model.config, **around.config, **width}, path=around.path)


def _vision(around: ServedModel, family: _Family) -> ServedModel:
    config = mapping(around, family.within) if family.within else around.config
    if not config:
        raise UsageError(f"{around.name} has no {family.within}; as a language model: --language-model-only")
    kind = config.get("model_type")
    if family.encoders and kind not in family.encoders:
        raise UsageError(
            f"{around.name}: an encoder of model_type {quoted(kind)} is not followed; accepted: "
            f"{', '.join(family.encoders)}, or the language model alone by --language-model-only"
        )
    return ServedModel(around.name, {**llava.DEFAULTS.get(str(kind), {}), **config})


def _processor(around: ServedModel, family: _Family, more: Arguments) -> Mapping[str, object]:
    """The settings of the images' preparation: the file beside the configuration, changed by ``mm_processor_kwargs``.
    Its values that name no modality are for both."""
    path = around.path.parent / PREPROCESSOR if around.path is not None else None
    values: Any = read(path, "a readable JSON file") if path is not None and path.is_file() else {}
    if not isinstance(values, dict):
        raise SourceError(f"{path} holds {quoted(values)}; accepted: an object")
    asked: dict[str, Any] = json.loads(more.processor)
    flat = {name: value for name, value in asked.items() if name not in ("images_kwargs", "videos_kwargs")}
    for scope in ("images_kwargs", "videos_kwargs"):
        own = asked.get(scope) or {}
        if not isinstance(own, Mapping):
            raise UsageError(f"{scope} of mm_processor_kwargs is {quoted(own)}; accepted: an object")
        _check_values({**flat, **own}, family)
        values[scope] = {**flat, **own}
    if values.get("do_pan_and_scan"):
        raise UsageError(f"{around.name}: do_pan_and_scan, which cuts images into crops, is not followed")
    return values


def _check_values(asked: Mapping[str, object], family: _Family) -> None:
    """Raises :class:`UsageError` for a value of the processor whose effect is not known."""
    for name in asked:
        if name not in (*family.processor, *_OF_REQUESTS):
            raise UsageError(
                f"{quoted(name)} of mm_processor_kwargs is not followed for this model; accepted: "
                f"{', '.join((*family.processor, *_OF_REQUESTS))}"
            )


def _check(around: ServedModel, question: Question, settings: Settings) -> None:
    """Raises :class:`UsageError` for options that are not followed with an encoder."""
    more, name = settings.more, around.name
    alone = "; the language model alone is: --language-model-only"
    if more.adapters:
        raise UsageError(f"{name}: adapters of a model with an encoder are not followed{alone}")
    if more.speculation:
        raise UsageError(f"{name}: drafts of a model with an encoder are not followed{alone}")
    if more.pipeline > 1:
        raise UsageError(f"{name}: a pipeline of a model with an encoder is not followed{alone}")
    method = around.config.get("quantization_config")
    if isinstance(method, Mapping) and not _spared(method):
        raise UsageError(f"{name}: quantization_config does not say that the encoder stays as it is{alone}")


def _spared(method: Mapping[str, object]) -> bool:
    """True if modules of the encoder are named among those that are not quantised."""
    named = [method.get(key) for key in ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")]
    modules = [str(one) for found in named if isinstance(found, list) for one in found]
    return any(part in one for one in modules for part in ("visual", "vision", "mm_projector"))
