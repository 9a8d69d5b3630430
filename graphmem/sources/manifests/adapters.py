"""Models of transformers as fine-tuning tools train them: with PEFT's adapters, on quantised weights where asked."""

from __future__ import annotations

import fnmatch
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphmem.errors import SourceError, first_line
from graphmem.sources.base import Built, Sizes, TorchModel
from graphmem.sources.huggingface import load_huggingface
from graphmem.training import DTYPES

if TYPE_CHECKING:
    from graphmem.sources.manifests import Manifest, Settings

#: Names of modules in files of torchtune -> in transformers' models.
_OF_TRANSFORMERS = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")


def built_model(manifest: Manifest) -> TorchModel:
    """The model of a file, of its batch and length where no others are asked for. Raises :class:`SourceError` for
    one that is not known, or without PEFT where it has adapters."""
    settings = manifest.settings
    if settings.adapter and importlib.util.find_spec("peft") is None:
        raise SourceError(f"{manifest.path} trains adapters, which are PEFT's own layers; install it: pip install peft")
    base = load_huggingface(settings.model)

    def build(sizes: Sizes) -> Built:
        batch, seq_len = sizes.batch or settings.batch, sizes.seq_len or settings.seq_len
        asked = replace(sizes, batch=batch, seq_len=seq_len)
        notes = () if sizes.batch else (f"batch {batch}, by the file",)
        return _built(base, asked, settings, notes)

    return replace(base, name=f"{manifest.path} ({base.name})", build=build, notes=(*manifest.notes(), *base.notes),
                   quantizes=False)  # fmt: skip


def _built(base: TorchModel, sizes: Sizes, settings: Settings, notes: tuple[str, ...]) -> Built:
    import torch

    dtype = DTYPES[settings.base_dtype][0]
    quantized = settings.adapter and settings.quantized is not None
    # weights that are packed are not trained: the model is built as for inference, its batches as for training
    of_model = replace(sizes, training=False, weights=settings.quantized, dtype=settings.base_dtype)
    built = base.build(of_model if quantized else sizes)
    assert built is not None
    assert built.batch_of is not None
    if not settings.adapter:
        return replace(built, notes=(*notes, *built.notes))
    model = built.model if quantized else built.model.to(getattr(torch, dtype))
    return replace(built, model=_adapted(model, settings), inputs=built.batch_of(sizes), notes=(*notes, *built.notes))


def _adapted(model: Any, settings: Settings) -> Any:
    """The model with adapters, as ``get_peft_model`` leaves it; below them quantised weights are prepared."""
    import peft

    rank = settings.lora_rank
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=_targets(model, settings), task_type="CAUSAL_LM"
    )
    try:
        if settings.quantized is not None:
            model = peft.prepare_model_for_kbit_training(model, settings.checkpoint_activations)
        elif settings.checkpoint_activations:
            model.enable_input_require_grads()
        return peft.get_peft_model(model, config, autocast_adapter_dtype=settings.adapter_dtype == "fp32")
    except (ValueError, ImportError) as error:
        raise SourceError(f"its adapters: {first_line(error)}") from None


def _targets(model: Any, settings: Settings) -> str | list[str]:
    """The modules that get adapters. A ``*`` stands for any letters."""
    given = settings.lora_targets
    if isinstance(given, str):
        if given in ("all", "all-linear", "all_linear"):
            return "all-linear"
        given = tuple(word.strip() for word in given.split(","))
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    asked = [_OF_TRANSFORMERS.get(name, name) for name in given]
    asked += [*(_MLP if settings.lora_mlp else ()), *(("lm_head",) if settings.lora_output else ())]
    return sorted({name for pattern in asked for name in fnmatch.filter(names, pattern)}) or asked
