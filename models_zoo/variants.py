"""Models of the zoo set up another way: a memory format, adapters. Each is ``models_zoo.variants:NAME`` to ``python -m
graphmem`` in a checkout."""

from __future__ import annotations

import torch
from torch import nn

from .libraries import LANGUAGE_MODELS, WithLabels, make_torchvision_importable
from .recipe import Batch, Device, Recipe, images, labels_are_inputs, own_loss
from .reference import resnet50


def _resnet50_channels_last() -> nn.Module:
    return resnet50.build().to(memory_format=torch.channels_last)


def _images_channels_last(batch: int, device: Device) -> Batch:
    pixels, classes = images()(batch, device)
    return pixels.contiguous(memory_format=torch.channels_last), classes


def _llama(adapted: bool) -> nn.Module:
    make_torchvision_importable()  # transformers imports it where it is installed
    import transformers

    spec = LANGUAGE_MODELS["llama160m"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**spec.arguments))
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"))
    return WithLabels(model)


_LENGTH = LANGUAGE_MODELS["llama160m"].length

resnet50_channels_last = Recipe(_resnet50_channels_last, _images_channels_last, resnet50.loss)
llama_small = Recipe(lambda: _llama(adapted=False), labels_are_inputs(_LENGTH), own_loss)
llama_small_lora = Recipe(lambda: _llama(adapted=True), labels_are_inputs(_LENGTH), own_loss)
