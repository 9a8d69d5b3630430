"""Runs one call of an entry: the part that is the same on a CUDA build and in a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from tests.recorded.functions import leaves
from tests.recorded.op_db.samples import Decoder, Json


def run(function: Callable[..., Any], sample: Json, mark: Callable[[], None]) -> None:
    """Make the arguments, then run forward and backward between two calls of ``mark``; the outputs stay alive."""
    torch.manual_seed(0)
    decoder = Decoder()
    positional, named = decoder.decode({"list": sample[0]["list"]}), decoder.decode(sample[1])
    gc.collect()
    gc.disable()
    try:
        mark()
        outputs = function(*positional, **named)
        roots = [out for out in leaves(outputs) if out.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        mark()
    finally:
        gc.enable()
