"""The description of a card that cuDNN plans from, without the card (``CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION``).

cuDNN 9.20 asks for all the fields but three, which 9.28 asks for besides and 9.20 passes over: where the count of
multiprocessors comes from, shared memory beyond a block's, the width of the memory's bus. Which of them change a plan
was found by changing them one at a time, 450 plans a card: on Hopper the clocks (the memory's in 3 of 150 plans, the
SM's in 1), on Blackwell the number of SMs and the shared memory of a block, on Turing, Ampere and Ada nothing but the
compute capability. Nothing else ever did.
"""

from __future__ import annotations

from typing import Any

from graphmem.devices import Device
from graphmem.devices.capabilities import CAPABILITIES
from graphmem.errors import UsageError

#: Clocks in kHz where the table of cards has none: those of an H200 (1,980 and 3,201 MHz). Only Hopper's plans ask.
_ASSUMED_CLOCKS = (1_980_000, 3_201_000)
#: L2 cache in bytes: an H200's. No plan depends on it.
_L2_BYTES = 60 << 20
#: Of an H200.
_BUS_BITS = 6144


def description(card: Device) -> dict[str, Any]:
    """The fields of cuDNN's description. Raises :class:`UsageError` for a card that is no CUDA card or unknown."""
    capability = card.compute_capability
    if capability is None:
        raise UsageError(f"cuDNN makes no plans for {card.name}, which is no CUDA card; leave --cudnn out")
    if capability not in CAPABILITIES:
        version = ".".join(map(str, capability))
        raise UsageError(f"the limits of compute capability {version} ({card.name}) are not known; leave --cudnn out")
    limits = card.limits
    sm_clock, memory_clock = card.clocks_khz or _ASSUMED_CLOCKS
    return {
        "deviceVer": capability[0] * 100 + capability[1] * 10,
        "deviceName": card.name,
        "multiProcessorCount": card.sm_count,
        "smCountOrigin": 0,  # the device's own
        "maxThreadsPerSM": card.max_threads_per_sm,
        "maxCtasPerSM": limits.resident_blocks,
        "maxSharedMemoryPerBlockOptin": limits.block_shared_bytes,
        "maxSharedMemoryPerBlock": 48 << 10,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": limits.reserved_shared_bytes,
        "maxRegistersPerSM": 65536,
        "regsPerBlock": 65536,
        "maxThreadsPerBlock": 1024,
        "maxBlockSize": [1024, 1024, 64],
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "warpSize": 32,
        "supportCoopLaunch": 1,
        "totalGlobalMem": card.capacity_bytes,
        "smClockRateKHz": sm_clock,
        "memClockRateKHz": memory_clock,
        "memoryBusWidth": _BUS_BITS,
        "l2CacheSize": _L2_BYTES,
        "driverVer": 13000,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
        "isTccDriver": 0,
    }


def check_supported(card: Device, cudart: int) -> None:
    """Raises :class:`UsageError` where a cuDNN built for this CUDA runtime (13000 for 13.0) has no kernels."""
    if cudart >= 13000 and card.compute_capability is not None and not card.limits.cuda_13:
        raise UsageError(f"cuDNN for CUDA 13 does not run on {card.name}; name one for CUDA 12, or leave --cudnn out")


def clocks_are_assumed(card: Device) -> bool:
    """Whether plans depend on clocks of this card that nobody has written down."""
    return card.compute_capability is not None and card.limits.cudnn_asks_clocks and card.clocks_khz is None
