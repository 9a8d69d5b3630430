"""A card as XLA's compiler takes it: a ``GpuTargetConfigProto`` in text (xla/stream_executor/device_description.proto).

The fields are those of XLA's own descriptions of cards (xla/backends/gpu/target_config/specs). What the table of cards
does not know is a usual figure of its kind; XLA's cost model looks at it when it decides what is computed together.
"""

from __future__ import annotations

from graphmem.devices import Device, as_cuda
from graphmem.errors import UsageError

#: 32-bit units of a multiprocessor (CUDA C++ Programming Guide, arithmetic throughput): 64 on these, else 128.
_SMALL_CORES = ((6, 0), (7, 0), (7, 2), (7, 5), (8, 0))
#: Compute capabilities whose own instructions XLA uses ("90a").
_ACCELERATED = 9
#: Taken where the table of cards has none: bytes a second of memory, kHz, bytes of the second-level cache.
_BANDWIDTH, _CLOCK_KHZ, _L2_BYTES = 1_000_000_000_000, 1_500_000, 32 << 20
#: The versions of CUDA and cuDNN that jax[cuda13] 0.10 brings.
_CUDA, _CUDNN = (13, 0, 0), (9, 20, 0)


def target_config(card: Device) -> str:
    """The text for a card. Raises :class:`UsageError` for one that JAX's CUDA build does not run on."""
    capability = card.compute_capability
    if capability is None or not card.limits.cuda_13:
        raise UsageError(
            f"JAX's CUDA build runs on NVIDIA cards of compute capability 7.5 and later, not on {card.name}"
        )
    limits = as_cuda(card).limits
    clock = card.boost_khz or (card.clocks_khz[0] if card.clocks_khz else _CLOCK_KHZ)
    feature = "feature_extension: ACCELERATED_FEATURES" if capability[0] >= _ACCELERATED else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {limits.shared_bytes}
  threads_per_core_limit: {card.max_threads_per_sm}
  core_count: {card.sm_count}
  fpus_per_core: {64 if capability in _SMALL_CORES else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {card.memory_bandwidth or _BANDWIDTH}
  l2_cache_size: {card.l2_cache_bytes or _L2_BYTES}
  clock_rate_ghz: {clock / 1e6}
  device_memory_size: {card.capacity_bytes}
  shared_memory_per_block_optin: {limits.block_shared_bytes}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
runtime_version {{ major: {_CUDA[0]} minor: {_CUDA[1]} patch: {_CUDA[2]} }}
device_description_str: "NVIDIA {card.name}"
"""
