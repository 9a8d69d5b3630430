"""The register of changes between versions of PyTorch: every change that a rule here follows.

A rule asks ``versions.FUSED_RMS_NORM.holds(torch_version)`` where it needs to know. A change names its source and the
releases whose CUDA builds were recorded on the stub driver; versions that were not looked at are named. ``python -m
graphmem.base.versions docs/modeling/versions.md`` writes the register there as a table.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from graphmem.base.records import public_value
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import UsageError

Version = tuple[int, int]

#: The versions of PyTorch that can be predicted: the rules were checked against recordings of the newest.
OLDEST: Version = (2, 4)
NEWEST: Version = (2, 15)
#: The oldest that may be installed: what is replaced in PyTorch's Python code is named otherwise before.
OLDEST_INSTALLED: Version = (2, 6)
#: Those of which recordings of whole steps hold the predictions (tests/golden/pytorch).
RECORDED: tuple[Version, ...] = (
    (2, 4), (2, 6), (2, 7), (2, 8), (2, 9), (2, 10), (2, 11), (2, 12), (2, 13), (2, 14), (2, 15),
)  # fmt: skip
#: The one whose wheel's cuDNN was asked for the plans of convolutions that are predicted without one.
COUNTED_CUDNN: Version = (2, 13)


def version_of(text: str) -> Version:
    """(major, minor) of a release such as ``2.6.0+cu124``. Raises ValueError for text that does not begin like one."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    return int(match[1]), int(match[2])


def words(version: Version) -> str:
    """``2.13`` for (2, 13)."""
    return ".".join(map(str, version))


# --- which version ----------------------------------------------------------------------------------------------------

_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.\d+)*(?:(?:a|b|rc|\.dev|\.post)\d*)?(?:\+[\w.]+)?")


def version_named(text: str | None) -> tuple[int, int]:
    """(major, minor) of ``2.6``, ``2.6.0`` or ``2.6.0+cu124``; None means the installed version, or the newest known.

    Versions after the newest known are taken, and noted by :func:`beyond_known`. Raises :class:`UsageError` for text
    that is no version, for versions before 2.4 and from 3.0 on.
    """
    if text is None:
        return installed_version() or NEWEST
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"torch version {text!r} is not a version; write it like 2.6 or 2.6.0")
    version = int(match[1]), int(match[2])
    if not OLDEST <= version < (3, 0):
        raise UsageError(f"unknown torch version {text!r}; accepted: {words(OLDEST)} to {words(NEWEST)}")
    return version


def installed_version() -> tuple[int, int] | None:
    """(major, minor) of the installed torch, None where there is none.

    Raises :class:`UsageError` if it is too old to run a step on fake tensors as graphmem does.
    """
    try:
        text = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    match = re.match(r"(\d+)\.(\d+)", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST_INSTALLED:
        raise UsageError(
            f"torch {text} is installed, and graphmem runs with {words(OLDEST_INSTALLED)} to {words(NEWEST)}; upgrade "
            f"torch, and write --torch-version {words(max(version, OLDEST))} to predict the older one"
        )
    return version


def installed() -> Version | None:
    """(major, minor) of the installed torch, however old; None where there is none."""
    text = installed_text()
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def installed_text() -> str:
    """The installed torch's whole version, such as ``2.13.0+cpu``; empty where there is none. Nothing is imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def of_this_pytorch() -> str:
    """The first remark where something in PyTorch is not as it was: whether its version is known."""
    version, text = installed(), installed_text().partition("+")[0]
    if version is not None and version > NEWEST:
        return f"PyTorch {text} is newer than {words(NEWEST)}, the newest known"
    return f"PyTorch {text or 'of no known version'} is not as it was released"


def version_notes(asked: tuple[int, int], installed: tuple[int, int]) -> list[str]:
    """Notes on a version that is not the installed one: the rules of it that are followed, and the cuDNN assumed."""
    notes = []
    if asked != installed:
        notes.append(
            f"PyTorch {words(asked)} is predicted with PyTorch {words(installed)} installed: its allocator and the "
            "allocator's options, cuBLAS's workspaces, the choice of attention kernels, and the kernels and composites "
            f"known to differ; but {words(installed)}'s Python code (optimizers, modules), gradient formulas and "
            "model library"
        )
    if asked != COUNTED_CUDNN:
        notes.append(
            f"cuDNN's convolution workspaces are those of PyTorch {words(COUNTED_CUDNN)}'s wheel, whatever version is "
            "predicted"
        )
    return notes


def beyond_known(asked: tuple[int, int]) -> list[Diagnostic]:
    """For the headline: that a version is newer than any whose rules are known; nothing for the others."""
    if asked <= NEWEST:
        return []
    return [Code.VERSION_NEWER.about(asked=words(asked), newest=words(NEWEST))]


def other_compiler(asked: tuple[int, int], installed: tuple[int, int]) -> list[Diagnostic]:
    """For the headline of a compiled step: that the compiler is not that of the version asked for."""
    if asked == installed:
        return []
    return [Code.OTHER_COMPILER.about(installed=words(installed), asked=words(asked))]


#: Variables of the environment that say how large libraries' workspaces are and how long they stay, and which library
#: computes products with a bias and attention.
WORKSPACE_VARIABLES = (
    "DISABLE_ADDMM_CUDA_LT",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)


def allocator_settings(environment: Mapping[str, str], torch_version: Version) -> str:
    """The text of the caching allocator's options in this environment (CUDA's name wins, as in 2.13)."""
    newer = environment.get("PYTORCH_ALLOC_CONF") if NAME_OF_OPTIONS.holds(torch_version) else None
    return environment.get("PYTORCH_CUDA_ALLOC_CONF") or newer or ""


def flag(environment: Mapping[str, str], name: str) -> bool | None:
    """``c10::utils::check_env``: 0 and 1 are understood, anything else is as if it were not set."""
    return {"0": False, "1": True}.get(environment.get(name, ""))


def workspace_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that are set, with their text: a trace depends on them."""
    return tuple((name, environment[name]) for name in WORKSPACE_VARIABLES if environment.get(name))


# --- the register -----------------------------------------------------------------------------------------------------


@public_value(frozen=True, slots=True)
class Since:
    """One change: ``what``: its subject, the first ``version`` that has it, and how it was ``before`` and is ``now``.

    ``source``: the file of PyTorch, or the pull request. ``recorded``: releases whose builds were recorded or whose
    wheels were read. ``assumed``: the part nobody looked at, in words.
    """

    what: str
    version: Version
    before: str
    now: str
    source: str
    recorded: tuple[str, ...] = ()
    assumed: str = ""

    def holds(self, torch_version: Version) -> bool:
        """True if this version of PyTorch has the change."""
        return torch_version >= self.version


# --- the allocator ----------------------------------------------------------------------------------------------------

LENIENT_OPTIONS = Since(
    "allocator: options",
    (2, 9),
    "read strictly",
    "read leniently",
    "c10/core/AllocatorConfig.cpp",
    (),
    "as far as releases and their notes show",
)
NAME_OF_OPTIONS = Since(
    "allocator: `PYTORCH_ALLOC_CONF`", (2, 9), "not read", "read where `PYTORCH_CUDA_ALLOC_CONF` is not set",
    "names in libc10 of the wheels", ("2.6.0", "2.7.1", "2.8.0", "2.9.1"),
)  # fmt: skip
OLDEST_BLOCK_FIRST = Since(
    "allocator: equal free blocks", (2, 12), "the lowest address first",
    "the one first that was made first: the front of a split is new, a merged block is the one that was freed",
    "pull request 178362", ("2.11.0", "2.12.1"),
)  # fmt: skip
OLDEST_SEGMENT_FIRST = Since(
    "allocator: equal free blocks", (2, 13), "the oldest first", "of the oldest segment first, there by address",
    "pull request 183591", ("2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip
ROUNDED_FRACTION = Since(
    "allocator: the cap of a memory fraction", (2, 13), "cut to whole bytes", "rounded to the nearest byte",
    "pull request 179444", ("2.11.0", "2.13.0"), "2.12 was not looked at and is taken to do as 2.11",
)  # fmt: skip
CAPTURES_APART = Since(
    "allocator: no events queried, no cache flushed", (2, 13), "while anything is routed to a private pool",
    "while the current stream is captured", "`is_capture_context`, c10/cuda/CUDACachingAllocator.h",
    ("2.11.0", "2.13.0"), "2.12 was not looked at and is taken to do as 2.11",
)  # fmt: skip

# --- process groups ---------------------------------------------------------------------------------------------------

STASHED_COLLECTIVES = Since(
    "ProcessGroupNCCL: tensors of collectives", (2, 8),
    "their use is recorded on NCCL's stream, unless `TORCH_NCCL_AVOID_RECORD_STREAMS`, or a gather or scatter of one "
    "tensor is waited for at once", "kept until the work is waited for (`TensorShelf`)",
    "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp of the wheels", ("2.6.0", "2.8.0", "2.9.1", "2.15.0"),
    "2.7 is taken to do as 2.6",
)  # fmt: skip

#: Every key of the allocator's options with the first version that takes it, as far as releases and their notes show.
#: 2.12 was not run: it is taken to accept what is in its release notes.
ALLOCATOR_OPTIONS: dict[str, Version] = {
    "backend": (2, 0),
    "expandable_segments": (2, 1),
    "expandable_segments_reserve": (2, 15),
    "expandable_segments_reserve_by_class": (2, 15),
    "garbage_collection_threshold": (1, 11),
    "graph_capture_record_stream_reuse": (2, 10),
    "large_segment_size_mb": (2, 11),
    "max_non_split_rounding_mb": (2, 6),
    "max_split_size_mb": (1, 10),
    "per_process_memory_fraction": (2, 10),
    "pinned_free_catch_all": (2, 12),
    "pinned_max_cached_size_mb": (2, 13),
    "pinned_max_round_threshold_mb": (2, 13),
    "pinned_num_register_threads": (2, 2),
    "pinned_reserve_segment_size_mb": (2, 10),
    "pinned_use_background_threads": (2, 6),
    "pinned_use_cuda_host_register": (2, 2),
    "release_lock_on_cudamalloc": (2, 2),
    "roundup_power2_divisions": (1, 12),
    "throw_on_cudamalloc_oom": (2, 12),
}

# --- libraries --------------------------------------------------------------------------------------------------------

CUBLASLT_BUFFER_KEPT = Since(
    "cublasLt's buffer of 1 MiB (`addmm` with a bias, also of one row)", (2, 9), "around every call",
    "kept per thread, beside cuBLAS's workspace", "pull request 156495", ("2.4.1", "2.6.0", "2.8.0", "2.9.1", "2.11.0"),
)  # fmt: skip
CUBLASLT_LEAVES_ROWS = Since(
    "cublasLt for `addmm` of one row with a bias", (2, 10), "called", "not called",
    "seen of ATen/native/cuda/Blas.cpp on the stub driver", ("2.9.1", "2.10.0"),
)  # fmt: skip
CUBLASLT_TAKES_ROWS = Since(
    "cublasLt for `addmm` of one row with a bias", (2, 11), "not called", "called again", "the same",
    ("2.10.0", "2.11.0"),
)  # fmt: skip
CUBLASLT_SHARES_WORKSPACE = Since(
    "cublasLt's buffer", (2, 12), "its own", "cuBLAS's workspace", "pull requests 173002, 175879",
    ("2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip
CUBLASLT_UNIFIED_OPTION = Since(
    "`TORCH_CUBLASLT_UNIFIED_WORKSPACE`", (2, 8), "not read",
    "1: cublasLt takes cuBLAS's workspace; 0: a buffer of its own",
    "pull request 145130; names in libtorch_cuda of the wheels", ("2.7.1", "2.8.0", "2.11.0"),
)  # fmt: skip
CUBLAS_WORKSPACES_GIVEN_BACK = Since(
    "workspaces of cuBLAS and cublasLt", (2, 15), "kept per thread and stream",
    "taken and given back by every product, 1 MiB by those of cublasLt; `TORCH_CUBLAS_WORKSPACE_CACHE=1` keeps them",
    "pull request 194311, ATen/cuda/CublasHandlePool.cpp", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
GROUPED_PRODUCTS_SMALLER = Since(
    "CUTLASS's workspace of `grouped_mm`", (2, 11), "640 bytes a multiprocessor", "512 (Hopper)",
    "seen of ATen/native/cuda/GroupMM.cu on the stub driver", ("2.10.0", "2.11.0", "2.13.0"),
    "Blackwell is taken to differ by as much",
)  # fmt: skip
CUBLASLT_ALONE = Since(
    "cublasLt with a buffer of its own (`TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`)", (2, 12), "asks for cuBLAS's handle and "
    "workspace too", "does not", "seen on the stub driver", ("2.9.1", "2.11.0", "2.13.0"),
    "2.12 is taken to do as 2.13",
)  # fmt: skip
FP8_ROWS_BY_CUBLASLT = Since(
    "`_scaled_mm` (fp8) with a scale per row", (2, 11), "CUTLASS, without a workspace", "cublasLt, on Hopper and later",
    "seen of ATen/native/cuda/ScaledBlas.cpp on the stub driver", ("2.9.1", "2.10.0", "2.11.0", "2.13.0", "2.15.0"),
)  # fmt: skip
CUDNN_ATTENTION_DEPRIORITIZED = Since(
    "`TORCH_CUDNN_SDPA_DEPRIORITIZED`", (2, 10), "not read", "1: cuDNN attention comes last on every card",
    "`check_prefer_cudnn_attention`, sdp_utils.cpp; names in libtorch_cuda of the wheels",
    ("2.9.1", "2.10.0", "2.11.0", "2.13.0", "2.15.0"),
)  # fmt: skip
LARGE_WORKSPACE_ON_BLACKWELL = Since(
    "cuBLAS's workspace on Blackwell", (2, 12), "8.1 MiB", "32 MiB", "pull request 175344", ("2.13.0",),
    "that 2.12 has it is read from the pull request",
)  # fmt: skip

#: cuDNN of the default CUDA wheel on PyPI as an integer (9.20.0 is 92000): the requirements of the wheels of 2.4.1,
#: 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; that of 2.5 is assumed.
WHEEL_CUDNN: dict[Version, int] = {
    (2, 4): 90100, (2, 5): 90100, (2, 6): 90100, (2, 7): 90501, (2, 8): 91002, (2, 9): 91002, (2, 10): 91002,
    (2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600,
}  # fmt: skip


def wheel_cudnn(torch_version: Version) -> int:
    """cuDNN version as an integer (9.20.0 is 92000) of the default wheel of a torch release or of the one before."""
    known = [version for version in WHEEL_CUDNN if version <= torch_version]
    return WHEEL_CUDNN[max(known, default=min(WHEEL_CUDNN))]


# --- attention --------------------------------------------------------------------------------------------------------

MATH_ATTENTION_IN_FP32 = Since(
    "math attention", (2, 5), "half types stay half, plain softmax, boolean masks filled into zeros",
    "fp32 inside, a softmax that is safe for masked rows", "ATen/native/transformers/attention.cpp",
    ("2.4.1", "2.6.0"), "that 2.5 has it",
)  # fmt: skip
FLASH_SEEDS_ON_DEVICE = Since(
    "seeds of flash attention", (2, 7), "on the host", "on the device", "ATen/native/transformers/cuda/flash_attn",
    ("2.6.0", "2.7.1", "2.9.1"),
)  # fmt: skip
CUDNN_DROPOUT_IN_SIXTEENTHS = Since(
    "dropout in cuDNN attention", (2, 12), "of any probability", "of multiples of 1/16, other calls are refused",
    "sdp_utils.cpp", ("2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip
CUDNN_ATTENTION_LIMITS_BATCH = Since(
    "batch and heads in cuDNN attention", (2, 13), "of any size", "up to 65,535", "`check_cudnn_tensor_shapes`, "
    "sdp_utils.cpp", ("2.12.1", "2.15.0"),
)  # fmt: skip

EFFICIENT_ATTENTION_GROUPED = Since(
    "memory-efficient attention of fewer key than query heads", (2, 14), "refused, so the math kernel in fp32",
    "taken; gradients of every head are summed into those of the groups. One key head needs no `enable_gqa` in any "
    "fused kernel", "pull request 191085", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
EFFICIENT_SEEDS_ON_DEVICE = Since(
    "seed and offset of memory-efficient attention without dropout", (2, 14), "on the host", "on the device",
    "ATen/native/transformers/cuda/attention.cu", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
ATTENTION_UNSQUEEZES = Since(
    "attention of three dimensions each", (2, 14), "the math kernel", "a batch of one, so the fused kernels take it",
    "seen of ATen/native/transformers/attention.cpp on the stub driver: heads are the first dimension, as "
    "`enable_gqa` shows", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip

# --- operators --------------------------------------------------------------------------------------------------------

RMS_NORM_UPCASTS = Since(
    "`rms_norm` of half types", (2, 5), "in half", "in fp32", "ATen/native/layer_norm.cpp", ("2.4.1", "2.6.0"),
    "that 2.5 has it",
)  # fmt: skip
RMS_NORM_WEIGHS_IN_FP32 = Since(
    "`rms_norm`: the weight", (2, 7), "multiplied in half", "multiplied in fp32", "pull request 147203",
    ("2.6.0", "2.7.1", "2.8.0"),
)  # fmt: skip
FUSED_RMS_NORM = Since("`rms_norm`", (2, 9), "six operators", "one kernel", "pull request 153666", ("2.8.0", "2.9.1"))
WHOLE_SLICES_SKIPPED = Since(
    "`x[:, 0]`: a slice for every `:` among other indices", (2, 9),
    "recorded, so the backward pass takes a gradient of the size of what was sliced", "left out",
    "`applySlice`, ATen/TensorIndexing.h of the wheels", ("2.4.1", "2.6.0", "2.8.0", "2.9.1"),
)  # fmt: skip
INDEX_BITS_COUNT_ROWS = Since(
    "sort of indices in the gradient of an embedding", (2, 13), "of every bit, 12 KiB more",
    "of the bits that count rows",
    "ATen/native/cuda/Embedding.cu", ("2.6.0", "2.9.1", "2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip
EMBEDDING_ADDS_ATOMICALLY = Since(
    "gradient of an embedding with few rows of many indices", (2, 11), "partial sums are kept", "added atomically",
    "ATen/native/cuda/EmbeddingBackwardKernel.cu", ("2.9.1", "2.10.0", "2.11.0", "2.12.1"),
)  # fmt: skip
TAKE_ALONG_DIM_COPIES = Since(
    "`take_along_dim`: indices that are broadcast", (2, 10), "read as they are",
    "copied, and kept for the backward pass", "ATen/native/TensorAdvancedIndexing.cpp, seen on the stub driver",
    ("2.6.0", "2.9.1", "2.10.0", "2.11.0"),
)  # fmt: skip
GROUP_NORM_IN_FP32 = Since(
    "half group norm", (2, 13), "statistics in half", "statistics in fp32 for the time of the call",
    "ATen/native/cuda/group_norm_kernel.cu", ("2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip
GROUP_NORM_COPIES_INSIDE = Since(
    "contiguous copy of what group norm reads", (2, 14), "made before and kept for the backward pass",
    "made by the kernel, and again backward: the input is kept as it lies", "seen of group_norm.cpp on the stub driver",
    ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
GROUP_NORM_KEEPS_CHANNELS_LAST = Since(
    "group norm of channels_last", (2, 15), "a contiguous copy",
    "computed as it lies; always a scale and a shift per channel, and no scale backward",
    "seen of ATen/native/cuda/group_norm_kernel.cu on the stub driver", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
CUB_COUNTS_UNIQUE_IN_64_BITS = Since(
    "storage of CUB's unique by key", (2, 7), "states of 8 bytes", "of 16", "cub/device/dispatch/"
    "dispatch_unique_by_key.cuh of CUDA 12.4 and 12.8", ("2.6.0", "2.7.1", "2.8.0", "2.9.1"),
)  # fmt: skip
THRUST_UNIQUE_BY_CUB = Since(
    "storage of Thrust's unique, of slices", (2, 15), "a single pass of its own",
    "CUB's selection with an allocation of its own, 2,304 bytes less for 100,000",
    "thrust/system/cuda/detail/unique.h of CUDA 13.2", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
CUB_ALIGNS_TILE_STATES = Since(
    "storage of CUB's scans, selections and runs", (2, 11), "the bytes of a state for each tile (CUDA 12)",
    "aligned once more, 256 to 512 bytes larger (CUDA 13)",
    "`AllocationSize`, cub/agent/single_pass_scan_operators.cuh of CUDA 12 and 13",
    ("2.6.0", "2.9.1", "2.10.0", "2.11.0", "2.13.0"), "other wheels of a release, of CUDA 12.6 or 13.2, are not told "
    "apart",
)  # fmt: skip
AUTOCAST_CACHE_SERVES_TRAINING = Since(
    "autocast's cache of casts", (2, 11), "casts as they were made: in inference mode, or without a gradient function",
    "none in inference mode, and all with a gradient function", "`cached_cast`, ATen/autocast_mode.cpp; pull request "
    "165068", ("2.10.0", "2.11.0", "2.13.0"),
)  # fmt: skip
PARTIAL_NORMS_COMPACT = Since(
    "partial results of `_foreach_norm` and `_foreach_max`", (2, 15), "as many of every tensor as of the largest",
    "as many as there are chunks, and a table of where each tensor's begin", "pull request 190549, "
    "ATen/native/cuda/ForeachReduceOp.cu", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
BOUNDS_IN_ONE_PASS = Since(
    "smallest and largest of what `bincount`, `histc`, `multinomial` and `index_put` check", (2, 13),
    "one after the other", "by `aminmax`", "SummaryOps.cu and Indexing.cu of ATen/native/cuda, Distributions.cpp",
    ("2.6.0", "2.9.1", "2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip
SCATTERS_BY_COORDINATES = Since(
    "deterministic `scatter`, `scatter_add` and gradient of `gather`", (2, 9),
    "coordinates side by side are made one index of the flat tensor", "an index per dimension",
    "`_scatter_via_index_put`, ATen/native/TensorAdvancedIndexing.cpp", ("2.6.0", "2.7.1", "2.8.0", "2.9.1"),
)  # fmt: skip
REPEATS_BY_SMALLEST = Since(
    "`repeat_interleave`: that no repeat is negative", (2, 15), "compared with zero one by one",
    "the smallest is read", "seen of ATen/native/Repeat.cpp on the stub driver", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
MULTINOMIAL_COPIES_NO_WEIGHTS = Since(
    "`multinomial` with replacement", (2, 15), "the weights are copied", "not copied", "ATen/native/cuda/"
    "MultinomialKernel.cu", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
SELECTION_IN_64_BITS = Since(
    "`topk` of many blocks: what each slice looks for", (2, 7), "32 bits", "64 bits", "ATen/native/cuda/TensorTopK.cu",
    ("2.6.0", "2.7.1", "2.8.0", "2.9.1"),
)  # fmt: skip
SELECTION_SUMS_DIGITS = Since(
    "`topk` of many blocks: sums of the digits' counts", (2, 10), "none", "1 KiB a slice",
    "ATen/native/cuda/TensorTopK.cu", ("2.9.1", "2.10.0", "2.11.0"),
)  # fmt: skip
ATAN2_OF_ZEROS = Since(
    "gradient of `atan2`", (2, 10), "squares and their sum go with the inverse",
    "the sum of the squares is kept, to find where it is zero",
    "`atan2_backward`, torch/csrc/autograd/FunctionsManual.cpp", ("2.6.0", "2.8.0", "2.9.1", "2.11.0"),
)  # fmt: skip
EQUAL_VALUES_SHARE_GRADIENTS = Since(
    "gradients of `clamp` with tensors, `maximum`, `minimum`, `fmax`, `fmin`", (2, 15),
    "one mask each of `clamp`, and all of it to one", "equal values share it: masks of who is taken, and of equals",
    "seen of what 2.15's formulas call, and on the stub driver", ("2.13.0", "2.14.1", "2.15.0"),
)  # fmt: skip
OUTER_PRODUCTS_BY_TRITON = Since(
    "`bmm` of columns by rows, where Triton is installed as it is beside the CUDA wheels", (2, 13), "cuBLAS",
    "a Triton kernel without copies or a workspace", "torch/_native/ops/bmm_outer_product; pull request 179082, taken "
    "back in 2.12", ("2.13.0",),
)  # fmt: skip

# --- Python -----------------------------------------------------------------------------------------------------------

TRUNCATED_NORMAL_BY_REJECTION = Since(
    "`trunc_normal_`", (2, 12), "by the inverse, in place", "by drawing again", "torch/nn/init.py",
    ("2.11.0", "2.12.1", "2.13.0"),
)  # fmt: skip

#: Every change above, in the order it is told.
CHANGES: tuple[Since, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Since))

#: The first PyTorch whose compiler has been compared with recordings; earlier ones keep other internals.
COMPILER_FOLLOWED_SINCE: Version = (2, 6)


# --- the table --------------------------------------------------------------------------------------------------------


def table() -> str:
    """The register as a table in Markdown, by version."""
    lines = [
        "| since | what | before | now | source | recorded with | assumed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for change in sorted(CHANGES, key=lambda change: change.version):
        cells = (change.before, change.now, change.source, ", ".join(change.recorded), change.assumed)
        lines.append(f"| {words(change.version)} | {change.what} | {' | '.join(cells)} |")
    lines += [
        "",
        "Keys of the allocator's options, by the first version that takes them:",
        "",
        "| since | keys |",
        "| --- | --- |",
    ]
    for version in sorted(set(ALLOCATOR_OPTIONS.values())):
        keys = ", ".join(f"`{key}`" for key, first in ALLOCATOR_OPTIONS.items() if first == version)
        lines.append(f"| {words(version)} | {keys} |")
    cudnn = ", ".join(f"{words(version)}: {cudnn_words(number)}" for version, number in WHEEL_CUDNN.items())
    lines += ["", f"cuDNN of the default CUDA wheel, which chooses between attention kernels: {cudnn}."]
    return "\n".join(lines) + "\n"


def cudnn_words(number: int) -> str:
    """``9.20.0`` for 92000."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


_BEGIN, _END = "<!-- register: begin -->\n", "<!-- register: end -->\n"


def with_table(page: str) -> str:
    """The page with the table between its two marks. Raises ValueError for a page without them."""
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no {_BEGIN.strip()} and {_END.strip()}")
    return head + begin + table() + end + tail


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
