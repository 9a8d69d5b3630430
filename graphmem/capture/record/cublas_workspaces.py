"""cuBLAS workspaces: buffers that PyTorch takes at a thread's first matrix product and keeps.

One per (host thread, stream). The forward pass runs on the caller's thread, the backward pass on the autograd engine's
device thread, so training holds two. Sources: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` (default sizes by compute
capability; the unified cublasLt workspace since 2.12) and the recorded runs of the CUDA build in ``tests/golden``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphmem import versions
from graphmem.capture.kernels.rules.matmul import is_outer_product
from graphmem.capture.operators.beside_outputs import CALLS_CUBLAS
from graphmem.devices.capabilities import Capability
from graphmem.errors import UsageError
from graphmem.units import KIB

_aten = torch.ops.aten

#: 2 x 4096 KiB + 8 x 16 KiB, the default below Hopper (``parseChosenWorkspaceSize``).
SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
#: 32 MiB on Hopper since 2.0; on Blackwell (10.x, 12.x) since 2.12 (pull request 175344).
LARGE_WORKSPACE = 32 * 1024 * KIB
#: cublasLt's own buffer up to 2.11 (``_parseChosenWorkspaceSize``).
LT_WORKSPACE = 1024 * KIB


def default_workspace_bytes(limits: Capability, torch_version: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace when ``CUBLAS_WORKSPACE_CONFIG`` is not set."""
    since = limits.large_workspace_since
    return LARGE_WORKSPACE if since is not None and torch_version >= since else SMALL_WORKSPACE


def configured_workspace_bytes(text: str) -> int:
    """Bytes of ``CUBLAS_WORKSPACE_CONFIG`` text such as ``:4096:8``. Raises :class:`UsageError` if unreadable."""
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        raise UsageError(f"CUBLAS_WORKSPACE_CONFIG={text!r} is not of the form :SIZE:COUNT[:SIZE:COUNT...] (KiB)")
    numbers = [int(part) for part in text.split(":")[1:]]
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * KIB


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """What one operator takes after its outputs: a ``temporary`` buffer around the rest (0: none), then ``kept`` ones
    as (label, bytes)."""

    kept: tuple[tuple[str, int], ...] = ()
    temporary: int = 0


NOTHING = WorkspaceUse()


class Workspaces:
    """Which workspaces a run holds already.

    cublasLt, which ``addmm`` with a bias uses, first had a buffer of its own around every call, then one kept per
    thread beside cuBLAS's, and now shares cuBLAS's (:mod:`graphmem.versions`).
    """

    def __init__(
        self,
        limits: Capability,
        torch_version: tuple[int, int],
        config: str | None = None,
        measured_bytes: int | None = None,
    ) -> None:
        if config is None:
            config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        by_rule = default_workspace_bytes(limits, torch_version)
        default = by_rule if measured_bytes is None else measured_bytes
        self.size = configured_workspace_bytes(config) if config else default
        self._version = torch_version
        self._held: set[tuple[str, bool, int]] = set()

    def use(self, func: Any, args: Sequence[Any], in_backward: bool, stream: int = 0) -> WorkspaceUse:
        """What this operator takes on ``stream``; notes what it keeps."""
        if func not in CALLS_CUBLAS or (func is _aten.bmm.default and is_outer_product(args[:2], self._version)):
            return NOTHING
        kept = list(self.use_cublas(in_backward, stream).kept)
        kept_lt = versions.CUBLASLT_BUFFER_KEPT.holds(self._version)
        separate_lt = not versions.CUBLASLT_SHARES_WORKSPACE.holds(self._version) and _uses_cublaslt(func, args)
        if separate_lt and kept_lt and self._is_first("cublasLt", in_backward, stream):
            kept.append((_label("cublasLt", in_backward, stream), LT_WORKSPACE))
        temporary = LT_WORKSPACE if separate_lt and not kept_lt else 0
        return WorkspaceUse(tuple(kept), temporary) if kept or temporary else NOTHING

    def use_cublas(self, in_backward: bool, stream: int = 0) -> WorkspaceUse:
        """What a call of cuBLAS takes on ``stream``; notes that it is kept."""
        if not self.size or not self._is_first("cuBLAS", in_backward, stream):
            return NOTHING
        return WorkspaceUse(((_label("cuBLAS", in_backward, stream), self.size),))

    def forget(self, stream: int | None = None) -> None:
        """The workspaces of ``stream``, or all, were given back: the next call takes new ones."""
        self._held = {key for key in self._held if stream is not None and key[2] != stream}

    def keep_only(self, labels: Collection[str]) -> None:
        """An operator that was to take some failed before: those of these names are there, and no others."""
        self._held = {key for key in self._held if _label(*key) in labels}

    def _is_first(self, library: str, in_backward: bool, stream: int) -> bool:
        key = (library, in_backward, stream)
        if key in self._held:
            return False
        self._held.add(key)
        return True


def _label(library: str, in_backward: bool, stream: int) -> str:
    return f"{library} workspace ({_where(in_backward, stream)})"


def _where(in_backward: bool, stream: int) -> str:
    thread = "autograd thread" if in_backward else "main thread"
    return f"{thread}, stream {stream}" if stream else thread


def _uses_cublaslt(func: Any, args: Sequence[Any]) -> bool:
    """The bias epilogue of ``addmm`` (ATen/native/cuda/Blas.cpp, ``addmm_out_cuda_impl``): a 1-D bias, and no side of 1
    in the second matrix. Recorded with 2.4.1, 2.6.0, 2.8.0, 2.9.1 and 2.11.0."""
    if func is not _aten.addmm.default or args[0].dim() != 1:
        return False
    return bool(min(args[2].shape) > 1)
