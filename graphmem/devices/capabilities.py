"""What a compute capability tells: one row a capability, which every rule that depends on it reads.

Sources, unless a field says another: the technical specifications per compute capability of the CUDA C++ Programming
Guide 13.0; files of PyTorch are 2.13's. A capability without a row (:data:`CAPABILITIES`) is taken for the nearest
older one (:func:`limits_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphmem import versions
from graphmem.units import KIB, MIB
from graphmem.versions import Version


@dataclass(frozen=True, slots=True)
class Links:
    """What joins the cards of a machine, as NCCL finds it (graph/search.cc, graph/paths.cc, transport/nvls.cc).

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

    #: First PyTorch whose cuBLAS workspace is 32 MiB instead of 8.1 (``parseChosenWorkspaceSize``,
    #: CublasHandlePool.cpp); None: not yet.
    large_workspace_since: Version | None
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

    #: CUTLASS's workspace of grouped products, bytes a multiprocessor with small groups and with others: on 9.x four
    #: tensor maps of 128 bytes; on 10.x as observed, for tiles of one multiprocessor and of two. None: no such kernel.
    grouped_product_bytes: tuple[int, int] | None

    #: ``MinSystemMemory`` of TensorFlow's gpu_device.cc: what is left to others of a card with 2 GiB or more.
    tensorflow_system_bytes: int

    #: Kernels of attention that vLLM takes (platforms/cuda.py, v1/attention/backends/fa_utils.py), and the largest
    #: batch in tokens of its CUDA graphs (config/vllm.py, ``_set_cudagraph_sizes``).
    vllm_attention: str = "other"
    vllm_largest_graph: int = 512

    #: NVLink of the data centre's cards; ``devices/nccl`` has the sources.
    links: Links = Links()

    @property
    def small_shared_memory(self) -> bool:
        """Whether a block has at most 99 KiB."""
        return self.block_shared_bytes <= 99 * KIB


_PASCAL = Capability(
    architecture="Pascal",
    shared_bytes=64 * KIB,
    block_shared_bytes=48 * KIB,
    reserved_shared_bytes=0,
    resident_blocks=32,
    l2_bytes=0,
    bfloat16=False,
    triton=False,
    cuda_13=False,
    large_workspace_since=None,
    cublas_bytes=4 * MIB,
    cub_sort=700,
    cub_unique=520,
    cudnn_trees="turing",  # cards before Turing were not asked about: the nearest
    cudnn_asks_clocks=False,
    cudnn_engine_mib=(180, 8, 350),
    cudnn_engine_source="assumed: between RTX 3060 (8 MiB) and A100 (250 to 350)",
    cudnn_attention="other",
    cudnn_attention_head=128,
    cudnn_attention_192_128=False,
    cudnn_attention_first=False,
    fp8_rows_by_cublaslt=False,
    rnn_persists=False,
    rnn_persistent_kernels=True,
    rnn_layer_workspaces=True,
    rnn_long_pipelines=True,
    flash_attention=False,
    flash_trains_wide_heads=True,
    efficient_attention=50,
    efficient_86_89=False,
    grouped_product_bytes=None,
    tensorflow_system_bytes=500 * MIB,
)
_VOLTA = replace(
    _PASCAL,
    architecture="Volta",
    shared_bytes=96 * KIB,
    block_shared_bytes=96 * KIB,
    triton=True,
    efficient_attention=70,
    tensorflow_system_bytes=1050 * MIB,
    links=Links(channels=12),
)
_TURING = replace(
    _VOLTA,
    architecture="Turing",
    shared_bytes=64 * KIB,
    block_shared_bytes=64 * KIB,
    resident_blocks=16,
    cuda_13=True,
    rnn_long_pipelines=False,
    efficient_attention=75,
    links=Links(),
)
_AMPERE = replace(
    _TURING,
    architecture="Ampere",
    shared_bytes=164 * KIB,
    block_shared_bytes=163 * KIB,
    reserved_shared_bytes=1 * KIB,
    resident_blocks=32,
    l2_bytes=40 * MIB,
    bfloat16=True,
    cub_sort=800,
    cub_unique=800,
    cudnn_trees="ampere",
    cudnn_engine_mib=(300, 250, 350),
    cudnn_engine_source="250 to 350 MiB: GPUMemNet's convolutional networks on A100 against its others",
    rnn_persists=True,
    rnn_layer_workspaces=False,
    rnn_long_pipelines=True,
    flash_attention=True,
    efficient_attention=80,
    tensorflow_system_bytes=1536 * MIB,
    vllm_attention="FlashAttention 2",
    links=Links(channels=24, reads=True, message_channels=32),
)
_AMPERE_SMALL = replace(
    _AMPERE,
    shared_bytes=100 * KIB,
    block_shared_bytes=99 * KIB,
    resident_blocks=16,
    l2_bytes=0,
    cub_unique=520,
    cudnn_trees="ampere_geforce",
    cudnn_engine_mib=(8, 2, 26),
    cudnn_engine_source="8 MiB: xMem's image networks on RTX 3060 load 26, its language models 18 (a page to all)",
    rnn_persists=False,
    flash_trains_wide_heads=False,
    efficient_86_89=True,
    links=Links(),
)
_HOPPER = replace(
    _AMPERE,
    architecture="Hopper",
    shared_bytes=228 * KIB,
    block_shared_bytes=227 * KIB,
    l2_bytes=50 * MIB,
    large_workspace_since=(2, 0),
    cublas_bytes=32 * MIB,
    cub_sort=900,
    cub_unique=900,
    cudnn_trees="hopper",
    cudnn_engine_mib=_PASCAL.cudnn_engine_mib,
    cudnn_engine_source=_PASCAL.cudnn_engine_source,
    cudnn_asks_clocks=True,
    cudnn_attention="hopper",
    cudnn_attention_head=256,
    cudnn_attention_first=True,
    fp8_rows_by_cublaslt=True,
    rnn_layer_workspaces=True,
    grouped_product_bytes=(512, 512),
    tensorflow_system_bytes=1800 * MIB,
    vllm_attention="FlashAttention 3",
    links=Links(channels=24, far_channels=4, message_channels=32, nvls_channels=(16, 16)),
)
_BLACKWELL = replace(
    _HOPPER,
    architecture="Blackwell",
    l2_bytes=0,
    large_workspace_since=versions.LARGE_WORKSPACE_ON_BLACKWELL.version,
    cudnn_trees="blackwell",
    cudnn_asks_clocks=False,
    cudnn_attention="blackwell",
    rnn_persistent_kernels=False,
    cudnn_attention_head=128,
    cudnn_attention_192_128=True,
    grouped_product_bytes=(5376, 5888),
    vllm_attention="other",
    vllm_largest_graph=1024,
    links=Links(channels=32, far_channels=4, message_channels=32, nvls_channels=(24, 32)),
)
_THOR = replace(
    _BLACKWELL,
    resident_blocks=24,
    large_workspace_since=None,
    cudnn_attention="other",
    cudnn_attention_192_128=False,
    cudnn_attention_first=False,
    grouped_product_bytes=None,
    vllm_largest_graph=512,
    links=Links(),
)
_BLACKWELL_SMALL = replace(
    _THOR,
    shared_bytes=100 * KIB,
    block_shared_bytes=99 * KIB,
    large_workspace_since=versions.LARGE_WORKSPACE_ON_BLACKWELL.version,
    cudnn_trees="blackwell_geforce",
    flash_trains_wide_heads=False,
    vllm_attention="FlashAttention 2",
)

#: The row of every known compute capability.
CAPABILITIES: dict[tuple[int, int], Capability] = {
    (6, 0): _PASCAL,
    (6, 1): replace(_PASCAL, shared_bytes=96 * KIB),
    (7, 0): _VOLTA,
    (7, 5): _TURING,
    (8, 0): _AMPERE,
    (8, 6): _AMPERE_SMALL,
    (8, 7): replace(
        _AMPERE_SMALL,
        shared_bytes=164 * KIB,
        block_shared_bytes=163 * KIB,
        rnn_persists=True,
        efficient_86_89=False,
    ),
    (8, 9): replace(_AMPERE_SMALL, architecture="Ada", resident_blocks=24, cudnn_trees="ada", rnn_persists=True),
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    (10, 3): _BLACKWELL,
    (11, 0): _THOR,
    (12, 0): _BLACKWELL_SMALL,
    (12, 1): _BLACKWELL_SMALL,
}


_MINORS = range(10)


def is_capability(compute_capability: tuple[int, int]) -> bool:
    """Whether cards of its generation are known: the first number is that of a row, the second a digit."""
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
    """Whether a card has at least this compute capability."""
    return compute_capability is not None and compute_capability >= least
