"""Activation checkpointing of the default step: a model's own way, or its outermost repeated blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from graphmem.capture.blocks import outermost_blocks
from graphmem.errors import CaptureError


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute the model's repeated blocks in the backward pass.

    A model that knows how (transformers' ``gradient_checkpointing_enable``, lately ``activation_checkpointing_enable``,
    timm's ``set_grad_checkpointing``) does it itself; elsewhere every element of the outermost lists of blocks
    (``nn.ModuleList``, ``nn.Sequential``) is checkpointed without reentrant autograd.
    """
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable", "set_grad_checkpointing"):
        enable: Callable[[], None] | None = getattr(model, method, None)
        if enable is not None:
            enable()
            return
    blocks = outermost_blocks(model)
    if not blocks:
        raise CaptureError("no repeated blocks found to checkpoint; call torch.utils.checkpoint in the model itself")
    for block in blocks:
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., object]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def run(*args: object, **kwargs: object) -> object:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
