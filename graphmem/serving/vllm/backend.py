"""Models that no family of this package follows: by a capture of transformers' code.

For architectures that the engine has no code of, or where ``--model-impl transformers`` asks for it, that code is run
by the engine itself (``TransformersForCausalLM``), with its own layers inside, and the capture is of the same. For
others the engine has code of its own, which is alike where it matters: the same projections in one product, the same
norms; it adds in place, and lets the embeddings go when the first layer has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from graphmem.base.documents import parse_json, shown
from graphmem.errors import UsageError
from graphmem.serving.base import Question, ServedModel
from graphmem.serving.values import count, number, rope_of
from graphmem.serving.vllm import arguments, families
from graphmem.serving.vllm.layers import LinearMethod
from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.models.captured import ADAPTED, Table, windows
from graphmem.serving.vllm.models.states import state_of
from graphmem.serving.vllm.settings import ENCODERS, Settings
from graphmem.sources.vllm_backend import followed, values_of_class
from graphmem.sources.vllm_layers import ROTARY, Backend, ExpertShape, Happening

#: ``model_type`` of captured decoders that vllm 0.32.0 has code of its own for (``_TEXT_GENERATION_MODELS``,
#: model_executor/models/registry.py); all others that transformers knows it runs by transformers' code.
OWN_CODE = frozenset((
    *ENCODERS, "afmoe", "apertus", "axk1", "bloom", "cohere", "cohere2", "cohere2_moe", "dbrx", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "gemma3n_text", "gemma4_text", "glm4_moe",
    "glm4_moe_lite", "gpt2", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hrm_text", "hy_v3", "hyperclovax", "internlm3", "iquestcoder",
    "laguna", "lfm2", "lfm2_moe", "llama4_text", "longcat_flash", "mimo_v2_flash", "minicpm3",
    "minimax_m2", "ministral3", "nemotron", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe", "qwen2_moe", "stablelm",
    "zamba2",
))  # fmt: skip
#: Those whose latent attention has a cache of latent keys (``is_deepseek_mla``,
#: transformers_utils/model_arch_config_convertor.py); so has that of models by transformers' code (fusers/mla.py).
_LATENT_CODE = ("axk1", "glm4_moe_lite", "longcat_flash")
#: ``model_type`` whose embeddings are let go when they were scaled or normed before the first layer.
_SCALED = ("afmoe", "bloom")
#: ``model_type`` whose rotary tables are made in fp32 (``get_rope`` of their files in model_executor/models).
_WIDE_TABLES = ("gpt_oss",)
#: ``model_type`` whose tensor parallel ranks slice tokens of experts that replicas gather (``is_sequence_parallel``).
SLICED = frozenset((
    "axk1", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "llama4_text",
    "mimo_v2_flash", "nemotron_h",
))  # fmt: skip
#: Captures that are remembered.
_REMEMBERED = 32


def is_captured(question: Question) -> bool:
    """True if a capture of the model is used. Raises :class:`UsageError` for options that the engine lacks."""
    asked = arguments.read(question.arguments).model_impl
    kind = question.model.config.get("model_type")
    if asked == "vllm" and kind not in OWN_CODE and kind not in families.MODEL_TYPES:
        raise UsageError(
            f"{question.model.name}: vLLM has no implementation of model_type {shown(kind)} of its own; leave "
            "--model-impl out, or give transformers"
        )
    if not isinstance(kind, str) or isinstance(question.model.config.get("text_config"), Mapping):
        return False
    return asked == "transformers" or kind not in families.MODEL_TYPES


def prepared(question: Question) -> Question:
    """The question with the defaults of transformers' configuration where the model is captured. Raises
    :class:`graphmem.errors.GraphmemError` for a model that transformers does not know."""
    if not is_captured(question):
        return question
    model = question.model
    values = values_of_class(dict(model.config), model.name)
    if "num_attention_heads" not in values:
        raise UsageError(
            f"{model.name}: {shown(values.get('model_type'))} has no layers of attention, which is what is followed of "
            "models by a capture"
        )
    return question.with_(model=ServedModel(model.name, values, model.checkpoint, model.path))


def shape(question: Question, settings: Settings, method: LinearMethod) -> Shape:
    """The model's sizes, with the capture. Raises :class:`graphmem.errors.GraphmemError`."""
    model, more, tp = question.model, settings.more, settings.tensor_parallel
    own = more.model_impl != "transformers" and model.config.get("model_type") in OWN_CODE
    for name, given in (
        ("--pipeline-parallel-size", more.pipeline > 1),
        ("--enable-lora", more.adapters is not None and own and model.config.get("model_type") not in ADAPTED),
        ("--speculative-config", more.speculation is not None and more.speculation.model is not None),
    ):
        if given:
            raise UsageError(f"{name} is not followed for a model by a capture; leave it out")
    text = json.dumps({key: one for key, one in model.config.items() if key != "quantization_config"}, sort_keys=True)
    latent = own and model.config.get("model_type") in _LATENT_CODE
    captured = _followed(text, model.name, settings.dtype, tp, own, latent)
    backend = _handed_on(captured, model.config.get("model_type") in _SCALED) if own else captured
    values, layers, rope = model.config, len(backend.attention), rope_of(model)
    turns = own and (any(_turns(one) for one in captured.forward) or bool(values.get("rotary_dim")))
    positions = int(values.get("max_position_embeddings") or 1)
    hidden = int(values["hidden_size"])
    states = [one.states for one in backend.layers if one.states is not None]
    conv = more.conv_state_bytes or settings.itemsize
    wide = 4 if values.get("mamba_ssm_cache_dtype") == "float32" else conv
    return Shape(
        kind=str(values.get("model_type")), hidden=hidden,
        intermediate=_widest(values.get("intermediate_size") or 4 * hidden), layers=layers,
        heads=backend.heads * tp, kv_heads=backend.kv_heads * tp, head_dim=backend.head_dim,
        vocab=int(values["vocab_size"]), positions=positions,
        itemsize=settings.itemsize, linear=method, tied=backend.encodes or bool(values.get("tie_word_embeddings")),
        windows=(None,) * layers if states else windows(values, layers), states=len(states),
        latent=families.latent_of(model) if _has_latent(values) else None,
        state=state_of(states[0], conv, more.scan_state_bytes or wide) if states else None,
        attends=tuple(range(layers)) if states else (), rope_positions=families.rope_positions(model, rope, positions),
        rotary_dim=_turned(model, rope, backend.head_dim) if turns else 0, ropes=_tables(model, backend, positions),
        rope_scaled=families.is_multiplied(rope),
        soft_cap=bool(values.get("final_logit_softcapping")), backend=backend, cached=backend.cached,
        value_dim=backend.value_dim,
        in_chunks=bool(values.get("attention_chunk_size")), experts=_experts(backend),
        rope_bytes=4 if own and values.get("model_type") in _WIDE_TABLES else 0,
    )  # fmt: skip


def _experts(backend: Backend) -> ExpertShape | None:
    """The experts of its layers, None for a model without any."""
    found = [(re.search(r"\.(\d+)\.", one.name), one.experts) for one in backend.layers]
    numbers = {int(match[1]): experts for match, experts in found if match is not None and experts is not None}
    if not numbers:
        return None
    dense = tuple(one for one in range(max(numbers)) if one not in numbers)
    return replace(next(iter(numbers.values())), dense_layers=dense)


def _has_latent(values: Mapping[str, object]) -> bool:
    kind = values.get("model_type")
    return bool(values.get("kv_lora_rank")) and (kind in _LATENT_CODE or kind not in OWN_CODE)


@lru_cache(maxsize=_REMEMBERED)
def _followed(text: str, name: str, dtype: str, tp: int, own_code: bool, latent: bool) -> Backend:
    return followed(parse_json(text), name, dtype, tp, own_code=own_code, latent=latent)


@lru_cache(maxsize=_REMEMBERED)
def _handed_on(backend: Backend, scales: bool) -> Backend:
    """The same as the engine's own code does it: transformers' model is not made first; cosines and sines are of a
    table that is made with the layers; what enters the first layer is let go when the second one begins, which
    transformers' code holds to the end, unless residuals are summed into it, or layers run again; encoders hold it too.
    ``scales``: so are embeddings that were scaled or normed before the first layer."""
    turning = {one.storage for one in backend.forward if _turns(one)}
    happenings = [one for one in backend.forward if one.storage not in turning]
    happenings = _scaled(happenings, backend) if scales else happenings
    first, second = (_begins(happenings, backend, layer) for layer in (0, 1))
    holds = backend.encodes or len(set(backend.attention)) < len(backend.attention)
    if second is not None and not holds and not backend.sums_in_place:
        entered = {one.storage for one in happenings[:first] if one.kind != "free"}
        gone = [one for one in happenings[second:] if one.kind == "free" and one.storage in entered]
        happenings = [*happenings[:second], *gone, *(one for one in happenings[second:] if one not in gone)]
    return replace(backend, making=(), forward=tuple(happenings), own_code=True)


def _scaled(happenings: list[Happening], backend: Backend) -> list[Happening]:
    """The same without embeddings that were scaled."""
    tables = {layer.name for layer in backend.layers if layer.kind == "embedding"}
    at = next((at for at, one in enumerate(happenings) if one.kind == "returned" and one.name in tables), None)
    first = _begins(happenings, backend, 0)
    if at is None or first is None or at + 1 >= first:
        return happenings
    table, after = happenings[at : at + 2]
    if after.kind != "new" or after.token_bytes != table.token_bytes:
        return happenings
    gone = next((one for one in happenings if one.kind == "free" and one.storage == table.storage), None)
    rest = [one for one in happenings[at + 2 :] if one is not gone]
    return [*happenings[: at + 2], *([gone] if gone is not None else []), *rest]


def _begins(happenings: list[Happening], backend: Backend, layer: int) -> int | None:
    """The first event of a layer; None for a model without so many."""
    found = re.match(r"model\.(.*?\.)\d+\.", backend.attention[0]) if backend.attention else None
    return next((at for at, one in enumerate(happenings) if found and f"{found[1]}{layer}." in one.name), None)


def _widest(sizes: object) -> int:
    """A size, or the largest of all layers'."""
    return max(map(int, sizes)) if isinstance(sizes, list) else int(str(sizes))


def _turns(one: Happening) -> bool:
    """True if it is of cosines and sines of the tokens' positions."""
    return one.kind == "new" and one.name == ROTARY


def _tables(model: ServedModel, backend: Backend, positions: int) -> tuple[Table, ...]:
    """The rotary table of every layer of attention; the engine keeps one for equal arguments (``get_rope``)."""
    rope, types = rope_of(model), model.config.get("layer_types")
    kinds = [one for one in types if one in rope] if isinstance(types, list) else []
    found = []
    for layer in range(len(backend.attention)):
        own = rope.get(str(kinds[layer])) if layer < len(kinds) else rope
        assert isinstance(own, Mapping)
        width = backend.cached[layer][1] if backend.cached and backend.cached[layer][1] else backend.head_dim
        whole = own.get("rope_type") == "proportional"  # (gemma4_rope.py)
        found.append(
            Table(
                families.rope_positions(model, own, positions), width if whole else _turned(model, own, width),
                families.is_multiplied(own), families.is_linear(own), str(own.get("rope_theta")),
            )
        )  # fmt: skip
    return tuple(found)


def _turned(model: ServedModel, rope: Mapping[str, object], head_dim: int) -> int:
    """The width of a head's part that is turned."""
    config = model.config
    if config.get("rotary_dim"):
        return count(model, "rotary_dim")
    given = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    return int(head_dim * min(1.0, number(model, "partial_rotary_factor", given, 1.0)))


def notes(shape: Shape, eager: bool) -> tuple[str, ...]:
    """Notes on the capture for the reader."""
    backend = shape.backend
    if backend is None:
        return ()
    found = []
    of = f"a capture of transformers {backend.version}'s {backend.architecture}"
    if backend.own_code:
        found.append(
            f"the activation peak is by {of}, not by the engine's code for {shape.kind}; for recorded starts of "
            "47 families that is within 0.25 % of what is left for the KV cache"
        )
    else:
        found.append(f"the engine runs {shape.kind} by transformers' code, and the activation peak is by {of}")
    if not eager:
        found.append(
            f"what torch.compile makes of {shape.kind} is followed where each layer has four products, one norm a "
            "part and no experts; else activations are taken as in eager mode"
        )
    return tuple(found)
