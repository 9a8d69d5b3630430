"""The card of the recordings, and figures of a sequence of allocations and frees."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphmem.devices import described_device
from graphmem.units import GIB, MIB
from tests import places

CARD = replace(described_device("H200", (9, 0), 80 * GIB, 132, 2048), l2_cache_bytes=50 * MIB)
TORCH_VERSION = places.PYTORCH_VERSION


def warm_up() -> None:
    """Both threads take their cuBLAS workspace now, and not inside a case."""
    weight = torch.zeros(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()


def peak_bytes(changes: list[int]) -> int:
    """Most bytes asked for at once, beyond what was there before."""
    current = peak = 0
    for change in changes:
        current += change
        peak = max(peak, current)
    return peak
