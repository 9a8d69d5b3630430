"""The model that a user names: a ``config.json``, a folder with one, a Hub model in the local cache, or of the table.

No network, no weights, no code of a model, and neither torch nor transformers: a configuration is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphmem.base.documents import shown
from graphmem.errors import SourceError
from graphmem.serving import gguf
from graphmem.serving.base import ServedModel
from graphmem.serving.caches import token_values
from graphmem.serving.stored import FAMILIES
from graphmem.sources.checkpoints import checkpoint_in
from graphmem.sources.configurations import values_of
from graphmem.sources.hub import cached_configuration, close_names, known_model, known_models


def _compressed(
    words: str, bits: int, kind: str, strategy: str, inputs: dict[str, Any] | None = None, size: int = 128
) -> Any:
    """llm-compressor's configuration of all linear layers but the head."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights | ({"group_size": size} if strategy == "group" else {})}
    groups = {"group_0": group | ({"input_activations": inputs} if inputs else {})}
    return words, {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": groups}


_FOUR_BITS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
_NVFP4 = {"targets": ["Linear"], "weights": _FOUR_BITS, "input_activations": {"num_bits": 4, "dynamic": "local"}}
_BY_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}
_BY_TENSOR = {"num_bits": 8, "dynamic": False, "strategy": "tensor"}
#: How the names of published checkpoints end, and whose -> how they are quantised as a rule: words and the
#: ``quantization_config``, empty where they are not. Who publishes them decides what FP8 means.
_QUANTISED: tuple[tuple[str, str, tuple[str, dict[str, Any]]], ...] = (
    (r"[-_](unsloth[-_])?bnb[-_]4bit", "", (
        "bitsandbytes, nf4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
    )),
    (r"[-_]awq([-_](int4|4bit))?", "(cyankiwi|cpatonn)/", _compressed(
        "4 bits in groups of 32", 4, "int", "group", size=32
    )),
    (r"[-_]awq([-_](int4|4bit))?", "", (
        "AWQ, 4 bits in groups of 128",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    )),
    (r"[-_]gptq([-_](int4|4bit))?", "", (
        "GPTQ, 4 bits in groups of 128", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    )),
    (r"[-_]gptq[-_](int8|8bit)", "", (
        "GPTQ, 8 bits in groups of 128", {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True},
    )),
    (r"[-.](quantized\.)?w4a16", "", _compressed("4 bits in groups of 128", 4, "int", "group")),
    (r"[-.](quantized\.)?w8a8", "", _compressed("8 bits by output", 8, "int", "channel", _BY_TOKEN)),
    (r"[-_]fp8[-_]dynamic", "", _compressed("FP8 by output", 8, "float", "channel", _BY_TOKEN)),
    (r"[-_]fp8", "(zai-org|thudm)/", _compressed("FP8 by output", 8, "float", "channel", _BY_TOKEN)),
    (r"[-_]fp8", "(redhatai|neuralmagic)/", _compressed("FP8 by tensor", 8, "float", "tensor", _BY_TENSOR)),
    (r"[-_]fp8", "nvidia/", ("FP8 by tensor", {"quant_method": "fp8", "activation_scheme": "static"})),
    (r"[-_]fp8", "", (
        "FP8 by blocks of 128",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )),
    (r"[-_.](nvfp4|fp4)", "(redhatai|neuralmagic|nm-testing)/", (
        "NVFP4 by compressed-tensors",
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": _NVFP4},
        },
    )),
    (r"[-_.](nvfp4|fp4)", "", ("NVFP4", {"quant_method": "modelopt_fp4", "group_size": 16, "ignore": ["lm_head"]})),
    (r"[-_]bf16", "", ("bfloat16", {})),
)  # fmt: skip


def model_named(name: str) -> ServedModel:
    """The configuration of ``name``; ``hf:`` before it is allowed. Raises :class:`SourceError`."""
    plain = name.removeprefix("hf:")
    path = Path(plain)
    if path.is_dir():
        return _read(path / "config.json", path.name)
    if path.suffix.lower() == ".gguf":
        return _gguf(path)
    if path.suffix == ".json" or path.is_file():
        return _read(path, path.parent.name if path.name == "config.json" and path.parent.name else path.name)
    cached = cached_configuration(plain)
    if cached is not None:
        return _read(cached, plain)
    known = known_model(plain)
    if known is not None:
        return ServedModel(known, known_models()[known])
    quantised = _quantised(plain)
    if quantised is not None:
        return quantised
    close = close_names(plain)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise SourceError(
        f"{shown(plain)} is neither a config.json, a folder with one, a model in this machine's Hugging Face cache nor "
        f"one of graphmem's table{hint}; else save its config.json and give that"
    )


def _quantised(name: str) -> ServedModel | None:
    """A model of the table whose name ends with how its checkpoint is quantised, as that is done as a rule."""
    for ending, owners, (words, config) in _QUANTISED:
        match = re.search(f"{ending}$", name.lower())
        if match is None or not re.match(owners, name.lower()):
            continue
        known = known_model(name[: match.start()]) or known_model(_last(name[: match.start()]))
        if known is not None:
            own = {**known_models()[known], "quantization_config": config}
            if not config:
                del own["quantization_config"]
            elif "vision_config" in own:
                own["quantization_config"] = _with_plain_encoder(config)
            return ServedModel(f"{known} ({words}: by the name {_last(name)})", own)
    return None


def known_by(name: str) -> str | None:
    """The model of the table that a published name means, however that checkpoint is quantised; None for none."""
    known = known_model(name)
    if known is None and (quantised := _quantised(name)) is not None:
        return quantised.name.partition(" (")[0]
    return known


def is_quantised(model: ServedModel, method: str | None) -> bool:
    """True if a configuration may be that of weights which an engine's log says are so quantised; None says nothing."""
    own = model.config.get("quantization_config")
    return method is None or not isinstance(own, dict) or _method(own.get("quant_method")) == _method(method)


def _method(name: object) -> str:
    return re.sub("_fp4$|_mixed$|_marlin$|^gpt_oss_", "", str(name))


#: A difference of a token's bytes up to this part is none, as caches are printed in few digits.
_SAME_TOKEN = 0.02


def models_like(model: ServedModel | None, architecture: str | None, method: str | None) -> Iterator[ServedModel]:
    """The model, or else those of the table with this class; as their checkpoints lie, and quantised by the method as
    that is done as a rule."""
    values: dict[str, dict[str, Any]]
    values = known_models() if model is None else {model.name: {**model.config, "quantization_config": None}}
    seen = []
    for name, config in values.items():
        if model is None and architecture not in _classes(config):
            continue
        packed = [(words, own) for _, _, (words, own) in _QUANTISED if own]
        ways = [(words, own) for words, own in packed if _method(own["quant_method"]) == _method(method)]
        if "vision_config" in config:
            ways = [(words, _with_plain_encoder(own)) for words, own in ways]
        for words, own in [("", config.get("quantization_config")), *ways]:
            whole = {**config, "quantization_config": own} if own else config
            if whole not in seen:
                seen.append(whole)
                yield ServedModel(f"{name} ({words})" if words else name, whole)


def models_keeping(token: float, cards: int, element: int) -> Iterator[ServedModel]:
    """Decoders of the table that keep so many bytes of a token, each configuration once."""
    seen: list[dict[str, Any]] = []
    for name, config in known_models().items():
        values = token_values(config, cards) if config.get("model_type") in FAMILIES else None
        if values is not None and abs(values * element / token - 1) <= _SAME_TOKEN and config not in seen:
            seen.append(config)
            yield ServedModel(name, config)


def quantised_somehow(model: ServedModel) -> Iterator[ServedModel]:
    """A model in every way that published checkpoints are quantised, as a rule."""
    for method in sorted({own["quant_method"] for _, _, (_, own) in _QUANTISED if own}):
        yield from models_like(model, None, method)


def _classes(config: dict[str, Any]) -> list[str]:
    return list(config.get("architectures") or ())


def _with_plain_encoder(config: dict[str, Any]) -> dict[str, Any]:
    """Encoders are left as they are: by the modules' names in the architectures that have one."""
    key = next((one for one in ("ignore", "llm_int8_skip_modules") if one in config), "modules_to_not_convert")
    return config | {key: [*config.get(key, ()), "visual", "vision_tower", "multi_modal_projector"]}


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def model_of_log(name: str) -> ServedModel:
    """The model that an engine's log names: often a folder of another machine, whose last parts are a model's name.
    Raises :class:`SourceError`."""
    for candidate in _spellings(name):
        try:
            return model_named(candidate)
        except SourceError:
            continue
    return model_named(name)


def _spellings(name: str) -> Iterator[str]:
    """The name; of a path the folder of the Hub's cache, or the last parts, where ModelScope writes dots as ``___``."""
    yield name
    plain = name.replace("___", ".").rstrip("/")
    if match := re.search(r"models--([\w.-]+?)--([\w.-]+)", plain):
        yield f"{match[1]}/{match[2]}"
    parts = plain.split("/")
    if len(parts) > 2:
        yield "/".join(parts[-2:])
    yield parts[-1]


def _gguf(path: Path) -> ServedModel:
    """A GGUF file by its header; the metadata stand for the configuration."""
    found = gguf.read(path)
    architecture = found.metadata.get("general.architecture")
    return ServedModel(path.name, {**found.metadata, "model_type": f"gguf: {architecture}"}, found)


def _read(path: Path, name: str) -> ServedModel:
    return ServedModel(name, values_of(path), checkpoint_in(path.parent), path)


def without_encoder(model: ServedModel) -> ServedModel:
    """The same model. Raises :class:`SourceError` for a configuration around a language model and encoders."""
    if isinstance(model.config.get("text_config"), dict) and "hidden_size" not in model.config:
        raise SourceError(f"{model.name} is a multimodal model, whose encoder is not followed yet")
    return model
