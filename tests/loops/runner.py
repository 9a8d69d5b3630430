"""Runs one loop: the part that is the same on a CUDA build and in a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from tests.loops.cases import Case


def run(case: Case, mark: Callable[[], None]) -> None:
    """The loop between two calls of ``mark``; what it holds or yields at its end stays alive until the second one.

    Without cuDNN's attention, whose workspace is cuDNN's own affair.
    """
    torch.manual_seed(0)
    cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    gc.collect()
    gc.disable()
    loop = case.run()
    try:
        mark()
        held = next(loop)
        mark()
        del held
    finally:
        loop.close()
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        gc.enable()
