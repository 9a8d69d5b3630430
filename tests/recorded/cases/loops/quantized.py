"""Optimizers outside torch: what the real package does on a CUDA build, and what the command line's names stand for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.recorded.cases.loops.networks import Transformer
from tests.recorded.cases.loops.registry import Loop, add, group, is_captured, plain

group("quantized")

#: bitsandbytes pages tensors of at least 100,000 values; its embedding here has 300,000.
_WIDE = 3125


class _Model(nn.Module):
    """Tensors on both sides of the limits of bitsandbytes: 4096 values for 8 bits, 100,000 for pages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(520, 96)
        self.blocks = nn.Sequential(nn.Linear(96, _WIDE), nn.GELU(), nn.Linear(_WIDE, 96), nn.LayerNorm(96))
        self.odd = nn.Linear(96, 67)
        self.head = nn.Linear(67, 520, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.odd(self.blocks(self.embedding(tokens))))


def _transposed() -> nn.Module:
    """A parameter, and so a gradient, that is not contiguous."""
    model = _Model()
    model.odd.weight = nn.Parameter(torch.empty(96, 67).t())
    return model


#: class name -> options
_CLASSES: dict[str, dict[str, Any]] = {
    "Adam8bit": {},
    "AdamW8bit": {},
    "AdamW32bit": {},
    "PagedAdamW8bit": {},
    "PagedAdamW32bit": {},
    "Lion8bit": {},
    "PagedLion8bit": {},
    "PagedLion32bit": {},
    "SGD8bit": {"lr": 0.1, "momentum": 0.9},
    "RMSprop8bit": {},
    "Adagrad8bit": {},
    "AdEMAMix": {},
    "AdEMAMix8bit": {},
    "AdEMAMix32bit": {},
    "PagedAdEMAMix8bit": {},
}


def _quantized(name: str, options: dict[str, Any], build: Any) -> Loop:
    def make(model: nn.Module) -> Any:
        if options.get("installed") or not is_captured(model):
            import bitsandbytes

            kind = getattr(bitsandbytes.optim, name)
        else:
            from graphmem.capture.loop.optimizers.bitsandbytes_states import QuantizedOptimizer

            kind = partial(QuantizedOptimizer, name)
        return kind(model.parameters(), **{key: value for key, value in options.items() if key != "installed"})

    yield from plain(make, build)


for _name, _options in _CLASSES.items():
    add(f"bitsandbytes_{_name}", partial(_quantized, _name, _options, _Model))
for _name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit"):
    add(f"bitsandbytes_{_name}_bf16", partial(_quantized, _name, {}, lambda: Transformer().bfloat16()))
add("bitsandbytes_AdamW8bit_larger_minimum", partial(_quantized, "AdamW8bit", {"min_8bit_size": 100_000}, _Model))
add("bitsandbytes_AdamW8bit_transposed", partial(_quantized, "AdamW8bit", {}, _transposed))
for _name in ("AdamW8bit", "PagedAdamW8bit", "PagedAdEMAMix8bit"):
    add(f"bitsandbytes_installed_{_name}", partial(_quantized, _name, {"installed": True}, _Model))


def _lion(options: dict[str, Any]) -> Loop:
    def make(model: nn.Module) -> Any:
        if is_captured(model):
            from graphmem.capture.loop.optimizers.lion import Lion
        else:
            from lion_pytorch import Lion
        return Lion(model.parameters(), **options)

    yield from plain(make)


add("lion", partial(_lion, {}))
add("lion_weight_decay", partial(_lion, {"weight_decay": 0.1, "decoupled_weight_decay": True}))
