"""Runs one loop: the part that is the same on a CUDA build and in a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from tests.loops.cases import Case

#: The card that the recordings were made for.
NAME, CAPABILITY, MULTIPROCESSORS, THREADS = "H200", (9, 0), 132, 2048


def warm_up() -> None:
    """Both threads take their cuBLAS workspace now, and not inside a case."""
    weight = torch.zeros(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()


def run(case: Case, mark: Callable[[], None]) -> None:
    """The loop between two calls of ``mark``; what it holds at its end stays alive until the second one.

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
        next(loop)
        mark()
    finally:
        loop.close()
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        gc.enable()


def peak_bytes(changes: list[int]) -> int:
    """Most bytes asked for at once, beyond what was there before."""
    current = peak = 0
    for change in changes:
        current += change
        peak = max(peak, current)
    return peak
