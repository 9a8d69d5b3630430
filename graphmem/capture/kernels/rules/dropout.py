"""Dropout's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphmem.capture.kernels.parts.script import Card, Script, rule


@rule("aten.native_dropout.default")
def native_dropout(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script:
    """The mask (one byte an element) is allocated before the output (``dropout_cuda`` in ATen/native/cuda/Dropout.cu;
    order seen in the recorded runs of 2.13)."""
    del args, kwargs, outputs, card
    return Script().output(1).output(0)
