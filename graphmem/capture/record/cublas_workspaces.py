"""cuBLAS workspaces: buffers that PyTorch gives its matrix products.

Up to 2.14 one per (host thread, stream) is taken at the first product and kept. The forward pass runs on the caller's
thread, the backward pass on the autograd engine's device thread, so training holds two. Since 2.15 every product takes
one and gives it back at once. Sources: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` (default sizes by compute
capability; the unified cublasLt workspace since 2.12; ``CUDABlasHandleWithWorkspace`` since 2.15),
``addmm_out_cuda_impl`` in ``aten/src/ATen/native/cuda/Blas.cpp``, and the recorded runs of the CUDA build in
``tests/golden``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from graphmem.base import versions
from graphmem.capture.kernels.rules.matmul import is_outer_product
from graphmem.capture.operators.facts import CALLS_CUBLAS
from graphmem.capture.torch_internals import OpOverload
from graphmem.devices.capabilities import Capability
from graphmem.torch_names import private
from graphmem.units import KIB

_aten = torch.ops.aten
_CUBLASLT: Any = private(
    "torch._C._BlasBackend.Cublaslt", "torch.backends.cuda.preferred_blas_library is not heard", ""
)

#: 2 x 4096 KiB + 8 x 16 KiB, the default below Hopper (``parseChosenWorkspaceSize``).
SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
#: 32 MiB on Hopper since 2.0; on Blackwell (10.x, 12.x) since 2.12 (pull request 175344).
LARGE_WORKSPACE = 32 * 1024 * KIB
#: cublasLt's own buffer where it does not share cuBLAS's (``parseCUDABlasLtWorkspaceSize``).
LT_WORKSPACE = 1024 * KIB


def default_workspace_bytes(limits: Capability, torch_version: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace when ``CUBLAS_WORKSPACE_CONFIG`` is not set."""
    since = limits.large_workspace_since
    return LARGE_WORKSPACE if since is not None and torch_version >= since else SMALL_WORKSPACE


@dataclass(frozen=True, slots=True)
class WorkspaceSettings:
    """The settings of workspaces in the environment, each variable in the versions that read it.

    ``cublas_bytes``, ``cublaslt_bytes``: their sizes, None for the default. ``kept``: a workspace stays with its thread
    and stream. ``shared``: cublasLt takes cuBLAS's. ``adds_bias``: cublasLt adds the bias of ``addmm``, which
    ``DISABLE_ADDMM_CUDA_LT`` (ATen/native/cuda/Blas.cpp) leaves to cuBLAS. ``prefers_lt``: cublasLt multiplies where it
    can (``blasPreferredBackend``, ATen/Context.h, where either name of the variable counts). PyTorch reads that while
    it is imported: a program that sets it is taken to do so before.
    """

    cublas_bytes: int | None
    cublaslt_bytes: int | None
    kept: bool
    shared: bool
    adds_bias: bool
    prefers_lt: bool

    @staticmethod
    def read(
        torch_version: tuple[int, int], environment: Mapping[str, str], is_rocm: bool = False
    ) -> WorkspaceSettings:
        """The settings of a process with this environment. Raises :class:`UsageError` for text that has no size."""
        kept = not versions.CUBLAS_WORKSPACES_GIVEN_BACK.holds(torch_version)
        kept = kept or versions.flag(environment, "TORCH_CUBLAS_WORKSPACE_CACHE") is True
        shared = versions.CUBLASLT_SHARES_WORKSPACE.holds(torch_version)
        if versions.CUBLASLT_UNIFIED_OPTION.holds(torch_version):
            asked = versions.flag(environment, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
            shared = shared if asked is None else asked
        return WorkspaceSettings(
            versions.workspace_bytes(environment, is_rocm),
            versions.lt_workspace_bytes(environment, is_rocm),
            kept,
            shared and kept,
            environment.get("DISABLE_ADDMM_CUDA_LT") != "1",
            any(versions.flag(environment, f"TORCH_BLAS_PREFER_{name}") for name in ("CUBLASLT", "HIPBLASLT")),
        )


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """The workspaces of one operator after its outputs: a ``temporary`` buffer (label, bytes) around the rest, one
    after another ``times`` over, and ``kept`` ones, by the first call, inside of the buffer or ``kept_before`` it."""

    kept: tuple[tuple[str, int], ...] = ()
    temporary: tuple[str, int] | None = None
    times: int = 1
    kept_before: bool = False


NOTHING = WorkspaceUse()


class Workspaces:
    """Which workspaces a run holds already.

    cublasLt, which ``addmm`` with a bias uses, first had a buffer of its own around every call, then one kept per
    thread beside cuBLAS's, then shared cuBLAS's; now both are taken and given back (:mod:`graphmem.base.versions`).
    """

    def __init__(
        self,
        limits: Capability,
        torch_version: tuple[int, int],
        measured_bytes: int | None = None,
        is_rocm: bool = False,
    ) -> None:
        by_rule = default_workspace_bytes(limits, torch_version)
        self._default = by_rule if measured_bytes is None else measured_bytes
        self._version = torch_version
        self._limits = limits
        self._is_rocm = is_rocm
        self._held: set[tuple[str, bool, int]] = set()
        self._backend = torch.backends.cuda.preferred_blas_library()

    @cached_property
    def settings(self) -> WorkspaceSettings:
        """Those of the first product: a program that sets a variable before it is heard (seen on the stub driver)."""
        return WorkspaceSettings.read(self._version, os.environ, self._is_rocm)

    @cached_property
    def size(self) -> int:
        """Bytes of a workspace of cuBLAS."""
        if not versions.CUBLAS_WORKSPACE_ALLOCATED.holds(self._version):
            return 0
        is_default = self.settings.cublas_bytes is None or self._default == 0
        return self._default if is_default else self.settings.cublas_bytes or 0

    @cached_property
    def _lt_size(self) -> int:
        if self._default == 0:  # a card without cuBLAS
            return 0
        return LT_WORKSPACE if self.settings.cublaslt_bytes is None else self.settings.cublaslt_bytes

    def use(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], in_backward: bool, stream: int = 0
    ) -> WorkspaceUse:
        """The workspaces that this operator takes on ``stream``; notes those it keeps."""
        if func not in CALLS_CUBLAS or (func is _aten.bmm.default and is_outer_product(args[:2], self._version)):
            return NOTHING
        if func in _SCALED and not self._scales_by_cublaslt(args, kwargs):
            return NOTHING
        if not self.settings.kept:
            fuses = self.settings.adds_bias and _fuses_bias(func, args, kwargs)
            if func in _SCALED or fuses or self._is_left_to_lt(func, args):
                return self._temporary("cublasLt", self._lt_size, _calls(func, args))
            return self._temporary("cuBLAS", self.size, _calls(func, args))
        separate_lt = not self.settings.shared and self._lt_size > 0
        adds_bias = self.settings.adds_bias and _uses_cublaslt(func, args, self._version)
        by_gemm = not adds_bias and func not in _SCALED and self._is_left_to_lt(func, args)
        separate_lt = separate_lt and (func in _SCALED or adds_bias or by_gemm)
        kept_lt = versions.CUBLASLT_BUFFER_KEPT.holds(self._version)
        alone = separate_lt and versions.CUBLASLT_ALONE.holds(self._version)
        kept = [] if alone else list(self.use_cublas(in_backward, stream).kept)
        if separate_lt and kept_lt and self._is_first("cublasLt", in_backward, stream):
            kept.append((_label("cublasLt", in_backward, stream), self._lt_size))
        passes = separate_lt and not kept_lt
        around = self._temporary("cublasLt", self._lt_size, _calls(func, args)) if passes else NOTHING
        # gemm asks for the handle, and so for cuBLAS's workspace, before its buffer, the bias' epilogue after it (2.6).
        use = WorkspaceUse(tuple(kept), around.temporary, around.times, by_gemm)
        return use if kept or around.temporary else NOTHING

    def _is_left_to_lt(self, func: OpOverload, args: Sequence[object]) -> bool:
        """True if cublasLt multiplies because it is preferred (``gemm_internal``, ``bgemm_internal`` of
        ATen/cuda/CUDABlas.cpp): products of matrices, and of half types those of a matrix and a vector, which are
        products of matrices there. Recorded with 2.6.0, 2.9.1, 2.11.0, 2.13.0 and 2.15.0."""
        backend = torch.backends.cuda.preferred_blas_library()
        by_variable = self.settings.prefers_lt and backend == self._backend  # torch.backends.cuda says otherwise later
        return (by_variable or backend == _CUBLASLT) and _is_product(func, args)

    def _scales_by_cublaslt(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a product of fp8 is cublasLt's: with one scale for all always, with one a row by version and card."""
        scale = kwargs["scale_a"] if "scale_a" in kwargs else args[2]
        by_rows = scale.numel() > 1 and scale.dtype is torch.float32
        return not by_rows or (versions.FP8_ROWS_BY_CUBLASLT.holds(self._version) and self._limits.fp8_rows_by_cublaslt)

    def use_cublas(self, in_backward: bool, stream: int = 0) -> WorkspaceUse:
        """The workspaces that a call of cuBLAS takes on ``stream``; notes those that are kept."""
        if not self.settings.kept:
            return self._temporary("cuBLAS", self.size)
        if not self.size or not self._is_first("cuBLAS", in_backward, stream):
            return NOTHING
        return WorkspaceUse(((_label("cuBLAS", in_backward, stream), self.size),))

    def forget(self, stream: int | None = None) -> None:
        """The workspaces of ``stream``, or all, were given back: the next call takes new ones."""
        self._held = {key for key in self._held if stream is not None and key[2] != stream}

    def keep_only(self, labels: Collection[str]) -> None:
        """An operator that was to take some failed before: those of these names are there, and no others."""
        self._held = {key for key in self._held if _label(*key) in labels}

    def _temporary(self, library: str, size: int, times: int = 1) -> WorkspaceUse:
        return WorkspaceUse(temporary=(f"{library} workspace", size), times=times) if size else NOTHING

    def _is_first(self, library: str, in_backward: bool, stream: int) -> bool:
        key = (library, in_backward, stream)
        if key in self._held:
            return False
        self._held.add(key)
        return True


#: Operators of :data:`CALLS_CUBLAS` that are no product of matrices, or not by ``gemm``.
_NO_GEMM = (_aten.dot.default, _aten.vdot.default, _aten._int_mm.default)
_BY_VECTOR = (_aten.mv.default, _aten.addmv.default)


def _is_product(func: OpOverload, args: Sequence[Any]) -> bool:
    if func in _BY_VECTOR:
        return args[0].dtype in _HALF_TYPES
    return func not in _NO_GEMM


def _calls(func: OpOverload, args: Sequence[Any]) -> int:
    """The number of products in an operator: ``addbmm`` adds one after another."""
    return len(args[1]) if func is _aten.addbmm.default else 1


def _label(library: str, in_backward: bool, stream: int) -> str:
    return f"{library} workspace ({_where(in_backward, stream)})"


def _where(in_backward: bool, stream: int) -> str:
    thread = "autograd thread" if in_backward else "main thread"
    return f"{thread}, stream {stream}" if stream else thread


#: Products of fp8, which cublasLt scales.
_SCALED = (_aten._scaled_mm.default, _aten._scaled_mm.out)
#: In place the bias is the result, which cublasLt does not take.
_ADDMM = (_aten.addmm.default, _aten.addmm.out)


def _uses_cublaslt(func: OpOverload, args: Sequence[Any], torch_version: tuple[int, int]) -> bool:
    """The bias epilogue of ``addmm`` (ATen/native/cuda/Blas.cpp, ``addmm_out_cuda_impl``): a 1-D bias, and no side of 1
    in the second matrix; nor a first of one row in 2.10. Recorded with 2.4.1, 2.6.0, 2.8.0, 2.9.1, 2.10.0, 2.11.0."""
    if func not in _ADDMM or args[0].dim() != 1:
        return False
    takes_rows = versions.CUBLASLT_TAKES_ROWS.holds(torch_version)
    if args[1].shape[0] == 1 and versions.CUBLASLT_LEAVES_ROWS.holds(torch_version) and not takes_rows:
        return False
    return bool(min(args[2].shape) > 1)


#: Dtypes whose matrix as a bias goes through cublasLt too (:func:`_fuses_bias`).
_HALF_TYPES = (torch.float16, torch.bfloat16)


def _fuses_bias(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if ``addmm`` of 2.15 calls cublasLt (``isInputCompliesAddmmCudaLt``, ATen/native/cuda/Blas.cpp): a bias of
    one dimension, or with others of size 1 to the left, contiguous, that is added as it is; of half types also a whole
    contiguous matrix. No side of the second matrix is 1. Observed with 2.15.0."""
    if func not in _ADDMM:
        return False
    bias, first, second = args[:3]
    if min(second.shape) <= 1 or not bias.is_contiguous() or bias.is_complex() or not bias.is_floating_point():
        return False
    if bias.shape and bias.shape[-1] == second.shape[1] and bias.numel() == second.shape[1]:
        return bool(kwargs.get("beta", 1) == 1)
    return bias.dtype in _HALF_TYPES and tuple(bias.shape) == (first.shape[0], second.shape[1])
