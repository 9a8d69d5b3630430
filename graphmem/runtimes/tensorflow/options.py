"""Settings of TensorFlow's GPU allocator: GPUOptions and environment variables, by their native names.

Sources: ``GPUOptions`` of tensorflow/core/protobuf/config.proto as in the 2.21 wheel; the routines named below in
tensorflow/core/common_runtime/gpu/ (``gpu_device.cc``, ``gpu_process_state.cc``, ``gpu_bfc_allocator.cc``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphmem.allocators.tensorflow_bfc import BFCOptions
from graphmem.errors import UsageError
from graphmem.units import GIB, MIB

#: GetDnnWorkspaceLimitOrDefault, xla/tsl/util or tensorflow/core/util/autotune: 8 GiB in 2.21, 4 GiB in older versions.
DEFAULT_CUDNN_WORKSPACE_BYTES = 8 * GIB
#: ``MinSystemMemory`` of gpu_device.cc: what is left to others of a card with less than 2 GiB available. Of larger ones
#: it depends on the compute capability (``graphmem.devices.capabilities``).
SMALL_CARD_BYTES, SMALL_CARD_SYSTEM_BYTES = 2 * GIB, 225 * MIB


@dataclass(frozen=True, slots=True)
class TensorFlowOptions:
    """The settings of one process, the environment's included. Names are TensorFlow's; sizes name their unit.

    ``memory_limit`` is that of ``tf.config.LogicalDeviceConfiguration``, in MiB. ``warnings`` are values that
    TensorFlow logs and ignores.
    """

    allow_growth: bool = False
    per_process_gpu_memory_fraction: float = 0.0
    internal_fragmentation_fraction: float = 0.0
    gpu_system_memory_size_in_mb: int = 0
    num_virtual_devices_per_gpu: int = 0
    memory_limit: float | None = None
    use_cuda_malloc_async: bool = False
    garbage_collection: bool = True
    min_sys_memory_in_mb: int | None = None
    per_device_memory_limit_mb: int = 0
    cudnn_workspace_limit_bytes: int = DEFAULT_CUDNN_WORKSPACE_BYTES
    async_preallocation_bytes: int = 0
    warnings: tuple[str, ...] = ()

    def bfc(self) -> BFCOptions:
        """The options of the BFC allocator."""
        return BFCOptions(self.allow_growth, self.garbage_collection, self.internal_fragmentation_fraction)


# --- values -----------------------------------------------------------------------------------------------------------


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("0 to 1 (more than 1 means unified memory, which is not modelled)")
    return value


def _megabytes(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ValueError("a whole number of MiB")
    return int(text)


def _devices(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise ValueError("a whole number")
    return int(text)


def _limit(text: str) -> float:
    value = float(text)
    if not 1 <= value < 2**40:
        raise ValueError("a number of MiB, at least 1")
    return value


#: GPUOptions (those of ``experimental`` without that word) -> how its value is read.
OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "allow_growth": _boolean,
    "per_process_gpu_memory_fraction": _fraction,
    "internal_fragmentation_fraction": _fraction,
    "gpu_system_memory_size_in_mb": _megabytes,
    "num_virtual_devices_per_gpu": _devices,
    "memory_limit": _limit,
    "use_cuda_malloc_async": _boolean,
}

#: Options of TensorFlow that graphmem refuses, and why; the value that changes nothing is accepted.
REFUSED = {
    "use_unified_memory": ("false", "unified memory is not modelled"),
    "timestamped_allocator": ("false", "chunks that wait for their kernels are not modelled"),
    "allocator_type": ("BFC", "TensorFlow has no other type; TF_GPU_ALLOCATOR chooses the allocator"),
}

Applied = dict[str, Any]


def _switch(field: str) -> Callable[[str, str], Applied]:
    """A variable that TensorFlow compares with ``true`` and ``false`` and otherwise ignores."""

    def read(name: str, value: str) -> Applied:
        if value in ("true", "false"):
            return {field: value == "true"}
        return _ignored(name, value, "it knows only true and false")

    return read


def _allocator(name: str, value: str) -> Applied:
    """``GPUProcessState::GetGPUAllocator``; any other word means the BFC allocator."""
    if value in ("cuda_malloc", "memory_guard"):
        raise UsageError(f"{name}={value} is an allocator for debugging and not modelled; drop it")
    if value == "cuda_malloc_async":
        return {"use_cuda_malloc_async": True}
    return {} if value == "" else _ignored(name, value, "it knows cuda_malloc_async, cuda_malloc and memory_guard")


def _number(field: str, factor: int = 1, least: int = 0) -> Callable[[str, str], Applied]:
    def read(name: str, value: str) -> Applied:
        if value == "":
            return {}
        if not re.fullmatch(r"-?[0-9]{1,18}", value) or int(value) < least:
            return _ignored(name, value, "it is not a number it accepts")
        return {field: int(value) * factor}

    return read


def _ignored(name: str, value: str, reason: str) -> Applied:
    return {"warnings": (f"TensorFlow ignores {name}={value}: {reason}",)}


#: Environment variable -> how it changes the options.
VARIABLES: Mapping[str, Callable[[str, str], Applied]] = {
    "TF_FORCE_GPU_ALLOW_GROWTH": _switch("allow_growth"),
    "TF_ENABLE_GPU_GARBAGE_COLLECTION": _switch("garbage_collection"),
    "TF_GPU_ALLOCATOR": _allocator,
    "TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC": _number("async_preallocation_bytes", least=-1),
    "TF_DEVICE_MIN_SYS_MEMORY_IN_MB": _number("min_sys_memory_in_mb"),
    "TF_PER_DEVICE_MEMORY_LIMIT_MB": _number("per_device_memory_limit_mb"),
    "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": _number("cudnn_workspace_limit_bytes", factor=MIB),
}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_options(text: str, environment: Mapping[str, str]) -> TensorFlowOptions:
    """The options of ``text``, such as ``allow_growth:true,TF_GPU_ALLOCATOR=cuda_malloc_async``, and the environment.

    ``text`` names GPUOptions and environment variables; a variable in it wins over the environment's. Raises
    :class:`~graphmem.errors.UsageError` listing what is accepted.
    """
    options = TensorFlowOptions()
    variables = {name: environment[name] for name in VARIABLES if name in environment}
    seen: set[str] = set()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, value = _named(entry)
        if name in seen:
            raise UsageError(f"{name} is given twice; give it once")
        seen.add(name)
        if name in VARIABLES:
            variables[name] = value
        elif name in REFUSED:
            harmless, reason = REFUSED[name]
            if value.lower() != harmless.lower():
                raise UsageError(f"{name}:{value} is refused: {reason}; accepted: {harmless}")
        else:
            options = _with_option(options, name, value)
    if options.memory_limit is not None and options.per_process_gpu_memory_fraction > 0:
        # VerifyVirtualDeviceSettings, gpu_device.cc
        raise UsageError("TensorFlow refuses per_process_gpu_memory_fraction together with memory_limit; give one")
    for name, value in variables.items():
        changes = VARIABLES[name](name, value)
        changes["warnings"] = (*options.warnings, *changes.get("warnings", ()))
        options = replace(options, **changes)
    return options


def _named(entry: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?:gpu_options\.)?(?:experimental\.)?(\w+)\s*[:=]\s*(.*)", entry)
    if match is None:
        raise UsageError(f"cannot read {entry!r}; write NAME:VALUE, for example allow_growth:true")
    return match.group(1), match.group(2)


def _with_option(options: TensorFlowOptions, name: str, value: str) -> TensorFlowOptions:
    if name not in OPTIONS:
        known = ", ".join((*OPTIONS, *VARIABLES))
        raise UsageError(f"TensorFlow has no memory option {name!r}; accepted: {known}")
    try:
        changes: Applied = {name: OPTIONS[name](value)}
    except ValueError as error:
        expected = str(error) if " " in str(error) and "convert" not in str(error) else "a number"
        raise UsageError(f"{name} is {value!r}; accepted: {expected}") from None
    return replace(options, **changes)


# --- the limit --------------------------------------------------------------------------------------------------------


def min_system_memory(available_bytes: int, system_bytes: int) -> int:
    """``MinSystemMemory`` of gpu_device.cc, for optimised builds: bytes left to libraries and other processes.

    ``system_bytes`` follows from the compute capability of cards with 2 GiB or more available.
    """
    return SMALL_CARD_SYSTEM_BYTES if available_bytes < SMALL_CARD_BYTES else system_bytes


def memory_limit_bytes(options: TensorFlowOptions, *, total_bytes: int, available_bytes: int, system_bytes: int) -> int:
    """The limit of the allocator: ``SingleVirtualDeviceMemoryLimit`` and ``CreateDevices`` of gpu_device.cc.

    ``total_bytes`` and ``available_bytes`` are the answer of ``cuMemGetInfo`` when the device is created.
    """
    if options.memory_limit is not None:
        return int(options.memory_limit) * MIB
    if options.per_process_gpu_memory_fraction > 0:
        limit = int(total_bytes * options.per_process_gpu_memory_fraction)
    else:
        system = min_system_memory(available_bytes, system_bytes)
        limit = available_bytes - system if system < available_bytes else available_bytes
    for megabytes in (options.gpu_system_memory_size_in_mb or None, options.min_sys_memory_in_mb):
        if megabytes is not None and megabytes * MIB <= available_bytes:
            limit = available_bytes - megabytes * MIB
    return limit // max(1, options.num_virtual_devices_per_gpu)
