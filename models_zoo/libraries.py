"""Models of transformers, torchvision and timm, built from configuration: no weights, no network.

Names are ``hf:gpt2``, ``hf:gpt2@eager`` (another attention implementation), ``tv:resnet50`` and ``timm:mixer_s16_224``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .recipe import Recipe, images, labels_are_inputs, own_loss


@dataclass(frozen=True)
class LanguageModelSpec:
    """A transformers model: its configuration class and arguments, model class, and sequence length."""

    config: str
    model: str
    length: int
    arguments: Mapping[str, Any]


_LLAMA_160M = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "use_cache": False,
}

_LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "use_cache": False,
}

_QWEN_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "use_cache": False,
}

LANGUAGE_MODELS: Mapping[str, LanguageModelSpec] = {
    "gpt2": LanguageModelSpec("GPT2Config", "GPT2LMHeadModel", 1024, {}),
    "bert": LanguageModelSpec("BertConfig", "BertForMaskedLM", 512, {}),
    "llama160m": LanguageModelSpec("LlamaConfig", "LlamaForCausalLM", 1024, _LLAMA_160M),
    "llama7b": LanguageModelSpec("LlamaConfig", "LlamaForCausalLM", 2048, _LLAMA_7B),
    "qwen05b": LanguageModelSpec("Qwen2Config", "Qwen2ForCausalLM", 1024, _QWEN_05B),
    "opt125m": LanguageModelSpec("OPTConfig", "OPTForCausalLM", 1024, {}),
}


class WithLabels(nn.Module):
    """A transformers model that is given its inputs as labels, and so makes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, labels=ids)


def recipe(name: str) -> Recipe:
    """The model called ``library:name``. Raises ``KeyError`` if unknown, ``ImportError`` without its library."""
    library, _, model = name.partition(":")
    return {"hf": transformers_model, "tv": torchvision_model, "timm": timm_model}[library](model)


def transformers_model(name: str) -> Recipe:
    """One of :data:`LANGUAGE_MODELS`, with ``@implementation`` for another attention than the default."""
    make_torchvision_importable()  # transformers imports it where it is installed
    import transformers

    name, _, attention = name.partition("@")
    spec = LANGUAGE_MODELS[name]
    config_class, model_class = getattr(transformers, spec.config), getattr(transformers, spec.model)

    def build() -> nn.Module:
        config = config_class(**spec.arguments)
        if attention:
            config._attn_implementation = attention
        return WithLabels(model_class(config))

    return Recipe(build, labels_are_inputs(spec.length), own_loss)


def torchvision_model(name: str) -> Recipe:
    """A torchvision classifier without weights."""
    make_torchvision_importable()
    from torchvision import models

    return Recipe(lambda: models.get_model(name, weights=None), images(), functional.cross_entropy)


def timm_model(name: str) -> Recipe:
    """A timm classifier without weights."""
    make_torchvision_importable()  # timm imports it
    import timm

    return Recipe(lambda: timm.create_model(name, pretrained=False), images(), functional.cross_entropy)


def make_torchvision_importable() -> None:
    """Let torchvision load without its compiled operators.

    Beside a CPU build of PyTorch, pip's torchvision may be a CUDA build. Its C++ library then fails to load, and its
    Python fails to import because it describes operators that nobody declared. Here they are declared, without
    kernels: torchvision's own Python gives them shapes, gradients and casts, and a capture needs no more.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_operators()
        with _library_taken_as_loaded():
            importlib.import_module("torchvision")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    _DECLARED.append(library)
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeImplicitAutograd")  # built for no CUDA: nothing to compare


@contextlib.contextmanager
def _library_taken_as_loaded() -> Iterator[None]:
    """torchvision asks whether its library was loaded before it registers anything for its operators."""
    load = torch.ops.load_library

    def unless_it_is_theirs(path: Any) -> None:
        if not os.path.basename(path).startswith("_C."):
            load(path)

    torch.ops.load_library = unless_it_is_theirs
    try:
        yield
    finally:
        torch.ops.load_library = load


#: Operator declarations, which last as long as these objects.
_DECLARED: list[torch.library.Library] = []
_POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SIZE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORMABLE = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
#: What torchvision 0.28 declares (``torchvision/csrc/ops/*.cpp``).
_SCHEMAS = (
    "_cuda_version() -> int",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOLED}, {_SIZE}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, "
    f"int rois_zero_point, {_POOLED}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOLED}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOLED}, {_SIZE}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOLED}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, int sampling_ratio, {_SIZE})"
    " -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOLED}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, {_SIZE}) -> Tensor",
    f"deform_conv2d({_DEFORMABLE}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORMABLE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
