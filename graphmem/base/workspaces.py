"""The variables of the environment that decide on the workspaces of matrix products, and what their texts say."""

from __future__ import annotations

import re
from collections.abc import Mapping

from graphmem.errors import UsageError
from graphmem.units import KIB

#: Variables that say how large libraries' workspaces are and how long they stay, and which library computes products
#: with a bias and attention.
VARIABLES = (
    "DISABLE_ADDMM_CUDA_LT",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "HIPBLAS_WORKSPACE_CONFIG",
    "HIPBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)


def variables_set(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that are set, with their text: a trace depends on them."""
    return tuple((name, environment[name]) for name in VARIABLES if environment.get(name))


def workspace_bytes(environment: Mapping[str, str], is_rocm: bool) -> int | None:
    """Bytes of a workspace of cuBLAS, or rocBLAS, as the environment sets them (``parseChosenWorkspaceSize`` of
    ATen/cuda/CublasHandlePool.cpp); None where it does not. Raises :class:`UsageError` for text that has no size."""
    name, text = _given(environment, "BLAS_WORKSPACE_CONFIG", is_rocm)
    if not text:
        return None
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        raise UsageError(f"{name}={text!r} is not of the form :SIZE:COUNT[:SIZE:COUNT...] (KiB)")
    numbers = [int(part) for part in text.split(":")[1:]]
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * KIB


def lt_workspace_bytes(environment: Mapping[str, str], is_rocm: bool) -> int | None:
    """The same of cublasLt's, or hipBLASLt's (``parseCUDABlasLtWorkspaceSize``)."""
    name, text = _given(environment, "BLASLT_WORKSPACE_SIZE", is_rocm)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"{name}={text!r} is not a number of KiB, such as 1024")
    return int(text) * KIB


def _given(environment: Mapping[str, str], name: str, is_rocm: bool) -> tuple[str, str]:
    """The variable and its text: CUDA's name, and where that is not set and the card is AMD's, ROCm's."""
    is_cuda = f"CU{name}" in environment or not is_rocm
    found = f"CU{name}" if is_cuda else f"HIP{name}"
    return found, environment.get(found, "")
