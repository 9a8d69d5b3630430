"""The repeated blocks of a model: the pieces that are recomputed and sharded."""

from __future__ import annotations

from torch import nn


def outermost_blocks(module: nn.Module) -> list[nn.Module]:
    """Every element of the outermost lists of blocks (``nn.ModuleList``, ``nn.Sequential``)."""
    blocks: list[nn.Module] = []
    for child in module.children():
        repeated = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1
        if repeated and all(len(list(element.children())) > 0 for element in child.children()):
            blocks.extend(child.children())
        else:
            blocks.extend(outermost_blocks(child))
    return blocks


def unsplit_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a transformers model names as not to be split (``_no_split_modules``), which Accelerate and
    ``Trainer`` shard one by one; the outermost blocks of any other model."""
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    named = [module for module in model.modules() if type(module).__name__ in names]
    return named or outermost_blocks(model)
