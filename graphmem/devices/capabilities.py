"""Compute capabilities: the table ``capabilities.toml``, which every rule that depends on the capability reads.

:class:`Capability` is a row; its comments give the meaning and source of each field. Unless a field names another
source, that is the technical specifications per compute capability of the CUDA C++ Programming Guide 13.0; files of
PyTorch are 2.13's. A capability without a row is taken for the nearest older one (:func:`limits_of`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from graphmem.base import versions
from graphmem.base.documents import check_fields
from graphmem.base.records import dataclass
from graphmem.base.versions import Version
from graphmem.units import KIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Links:
    """The links between a machine's cards, as NCCL finds them (graph/search.cc, graph/paths.cc, transport/nvls.cc).

    ``channels`` of rings over NVLink, 0 without it; ``reads``: buffers lie at the sender; ``far_channels`` a card
    across machines, ``most_far_channels`` in all; ``message_channels`` with one peer; ``nvls_channels`` in one machine
    and across several, 0 without NVLS; ``bridged_channels`` without NVLink."""

    channels: int = 0
    reads: bool = False
    far_channels: int = 2
    most_far_channels: int = 16
    message_channels: int = 2
    nvls_channels: tuple[int, int] = (0, 0)
    bridged_channels: int = 2


@dataclass(frozen=True, slots=True)
class Capability:
    """Limits of the cards of one compute capability, and which kernels the libraries choose for it. Sizes are bytes."""

    #: What this row stands on beside the sources of the fields.
    source: str

    architecture: str
    #: Shared memory of a multiprocessor, and what one block may opt in to.
    shared_bytes: int
    block_shared_bytes: int
    #: Shared memory that CUDA keeps of every block.
    reserved_shared_bytes: int
    #: Blocks that are resident on a multiprocessor.
    resident_blocks: int
    #: Second-level cache where all cards of the capability have the same (tuning guides for Ampere and Hopper), else 0.
    l2_bytes: int

    #: Whether tensor cores, and so cuDNN (supportsBFloat16ConvolutionWithCuDNNv8), take bfloat16 and TF32.
    bfloat16: bool
    #: Whether Triton compiles for it.
    triton: bool
    #: Whether cuDNN for CUDA 13 has kernels for it (support matrix of cuDNN 9.20).
    cuda_13: bool

    #: What NVIDIA recommends to give ``cublasSetWorkspace`` (cuBLAS documentation, by architecture), taken for what a
    #: handle of cuBLAS allocates by itself.
    cublas_bytes: int

    #: Tuning policy of CUB's one-sweep radix sort and of its unique by key (``tuning_radix_sort.cuh``,
    #: ``tuning_unique_by_key.cuh``), as the architecture that it was made for.
    cub_sort: int
    cub_unique: int

    #: Trees of cuDNN's convolutions (``cudnn/predicted/plans``).
    cudnn_trees: str
    #: Whether cuDNN's plans depend on the card's clocks.
    cudnn_asks_clocks: bool
    #: What cuDNN loads outside the allocator once something convolves or recurs, in MiB: as expected, least and most;
    #: and where that comes from (``devices/context`` has the sources).
    cudnn_engine_mib: tuple[int, int, int]
    cudnn_engine_source: str
    #: Whose kernels cuDNN's attention runs: ``hopper``, ``blackwell`` or ``other``.
    cudnn_attention: str
    #: Widest head that cuDNN attention takes; and whether it takes keys of 192 with values of 128 (sdp_utils.cpp).
    cudnn_attention_head: int
    cudnn_attention_192_128: bool
    #: Whether cuDNN attention is tried first where cuDNN is above 9.15 (sdp_utils.cpp, ``priority_order``).
    cudnn_attention_first: bool
    #: Whether cublasLt multiplies fp8 matrices with a scale per row (ScaledBlas.cpp: 9.0 and later).
    fp8_rows_by_cublaslt: bool

    #: Recurrent networks: whether PyTorch asks cuDNN to keep wide layers on the chip (RNN.cpp,
    #: ``use_persist_device_heuristics``), and, as cuDNN 9.20 tells of its spaces, whether it has kernels for that,
    #: whether layers of one direction have cuBLAS workspaces each, and whether more steps of long sequences are in
    #: flight.
    rnn_persists: bool
    rnn_persistent_kernels: bool
    rnn_layer_workspaces: bool
    rnn_long_pipelines: bool

    #: Whether flash and cuDNN attention have kernels (sdp_utils.cpp: 8.0 to 12.1).
    flash_attention: bool
    #: Whether flash attention trains heads wider than 192 with dropout, or of 193 to 224 (sdp_utils.cpp: not on 8.6 to
    #: 8.9, nor on 12.x).
    flash_trains_wide_heads: bool
    #: Kernels of memory-efficient attention, as the architecture that they were made for (kernels/cutlassB.h).
    efficient_attention: int
    #: Whether it runs those kernels of cutlassB.h that are marked ``cc == 86 || cc == 89``.
    efficient_86_89: bool

    #: ``MinSystemMemory`` of TensorFlow's gpu_device.cc: what is left to others of a card with 2 GiB or more.
    tensorflow_system_bytes: int

    #: Kernels of attention that vLLM takes (platforms/cuda.py, v1/attention/backends/fa_utils.py), and the largest
    #: batch in tokens of its CUDA graphs (config/vllm.py, ``_set_cudagraph_sizes``).
    vllm_attention: str
    vllm_largest_graph: int

    #: First PyTorch whose cuBLAS workspace is 32 MiB instead of 8.1 (``parseChosenWorkspaceSize``,
    #: CublasHandlePool.cpp); None: not yet.
    large_workspace_since: Version | None = None
    #: CUTLASS's workspace of grouped products, bytes a multiprocessor with small groups and with others: on 9.x four
    #: tensor maps of 128 bytes; on 10.x as observed, for tiles of one multiprocessor and of two. None: no such kernel.
    grouped_product_bytes: tuple[int, int] | None = None
    #: NVLink of the data centre's cards; ``devices/nccl`` has the sources.
    links: Links = Links()
    #: What in this row nobody has looked at, in words.
    assumed: str = ""

    @property
    def small_shared_memory(self) -> bool:
        """True if a block has at most 99 KiB."""
        return self.block_shared_bytes <= 99 * KIB


def read_capabilities(text: str) -> dict[tuple[int, int], Capability]:
    """The rows of a table like ``capabilities.toml``, by compute capability.

    Raises :class:`ValueError` naming the row that lacks a field, has an unknown one or a value of another type, or
    whose capability has a row already.
    """
    rows: dict[tuple[int, int], Capability] = {}
    for table in tomllib.loads(text)["capability"]:
        numbers = table.pop("numbers")
        try:
            row = _row(table)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"compute capability {', '.join(numbers)}: {error}") from None
        for number in numbers:
            major, minor = number.split(".")
            if rows.setdefault((int(major), int(minor)), row) is not row:
                raise ValueError(f"compute capability {number} has two rows")
    return rows


def _row(table: Mapping[str, Any]) -> Capability:
    values = _tuples(table)
    if isinstance(change := values.get("large_workspace_since"), str):
        values["large_workspace_since"] = getattr(versions, change).version
    links = _tuples(values.pop("links", {}))
    check_fields(Links, links)
    check_fields(Capability, values)
    return Capability(**values, links=Links(**links))


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


#: The row of every known compute capability.
CAPABILITIES = read_capabilities(files("graphmem.devices").joinpath("capabilities.toml").read_text(encoding="utf-8"))

_MINORS = range(10)


def is_capability(compute_capability: tuple[int, int]) -> bool:
    """True if cards of its generation are known: the first number is that of a row, the second a digit."""
    major, minor = compute_capability
    return major in {known for known, _ in CAPABILITIES} and minor in _MINORS


def limits_of(compute_capability: tuple[int, int]) -> Capability:
    """The row of a compute capability, or of the nearest older one; of the oldest where there is none."""
    row = CAPABILITIES.get(compute_capability)
    if row is None:
        older = [known for known in CAPABILITIES if known < compute_capability]
        row = CAPABILITIES[max(older, default=min(CAPABILITIES))]
    return row


def reaches(compute_capability: tuple[int, int] | None, least: tuple[int, int]) -> bool:
    """True if a card has at least this compute capability."""
    return compute_capability is not None and compute_capability >= least
