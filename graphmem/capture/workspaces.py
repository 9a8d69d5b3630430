"""cuBLAS workspaces: buffers that PyTorch takes at a thread's first matrix product and keeps.

One per (host thread, stream). The forward pass runs on the caller's thread, the backward pass on the autograd engine's
device thread, so training holds two. Sources: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` (default sizes by compute
capability; the unified cublasLt workspace since 2.12) and the recorded runs of the CUDA build in ``tests/golden``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from graphmem.errors import UsageError
from graphmem.units import KIB

_aten = torch.ops.aten

#: Operators that end in a cuBLAS call on CUDA.
GEMMS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addbmm.default,
    _aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten.vdot.default, _aten._int_mm.default,
    _aten.addmm_.default, _aten.baddbmm_.default,
}  # fmt: skip

#: 2 x 4096 KiB + 8 x 16 KiB, the default below Hopper (``parseChosenWorkspaceSize``).
SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
#: 32 MiB on Hopper since 2.0; on Blackwell (10.x, 12.x) since 2.12 (pull request 175344).
LARGE_WORKSPACE = 32 * 1024 * KIB
#: cublasLt's own buffer up to 2.11 (``_parseChosenWorkspaceSize``).
LT_WORKSPACE = 1024 * KIB


def default_workspace_bytes(capability: tuple[int, int], torch_version: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace when ``CUBLAS_WORKSPACE_CONFIG`` is not set."""
    major = capability[0]
    if major == 9 or (major in (10, 12) and torch_version >= (2, 12)):
        return LARGE_WORKSPACE
    return SMALL_WORKSPACE


def configured_workspace_bytes(text: str) -> int:
    """Bytes of ``CUBLAS_WORKSPACE_CONFIG`` text such as ``:4096:8``. Raises :class:`UsageError` if unreadable."""
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        raise UsageError(f"CUBLAS_WORKSPACE_CONFIG={text!r} is not of the form :SIZE:COUNT[:SIZE:COUNT...] (KiB)")
    numbers = [int(part) for part in text.split(":")[1:]]
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * KIB


class Workspaces:
    """Which workspaces a run holds already."""

    def __init__(self, capability: tuple[int, int], torch_version: tuple[int, int], config: str | None = None) -> None:
        if config is None:
            config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        self.size = configured_workspace_bytes(config) if config else default_workspace_bytes(capability, torch_version)
        self._separate_lt = (2, 9) <= torch_version < (2, 12)
        self._held: dict[bool, bool] = {False: False, True: False}

    def needed(self, func: Any, in_backward: bool) -> Sequence[tuple[str, int]]:
        """(label, bytes) of the workspaces that this operator takes for keeps, in order."""
        if func not in GEMMS or self._held[in_backward]:
            return ()
        thread = "autograd thread" if in_backward else "main thread"
        needed = [(f"cuBLAS workspace ({thread})", self.size)]
        if self._separate_lt and not in_backward and func is _aten.addmm.default:
            needed.append((f"cublasLt workspace ({thread})", LT_WORKSPACE))
        return needed if self.size else ()

    def taken(self, in_backward: bool) -> None:
        """Note that the thread's workspaces are held from now on."""
        self._held[in_backward] = True
