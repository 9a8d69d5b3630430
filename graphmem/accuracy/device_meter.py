"""Memory of the whole card in use: by NVML where its Python binding is installed, else by the CUDA runtime."""

from __future__ import annotations

import os
from typing import Any


class DeviceMeter:
    """Reads how many bytes of card 0 are in use by everybody. ``driver`` is the driver's version, "" if unknown.

    NVML sees the card without making a context, so that a baseline can be read first; the CUDA runtime cannot.
    """

    def __init__(self) -> None:
        self._nvml, self._handle = _open_nvml()
        self.driver = _driver_version(self._nvml)

    @property
    def name(self) -> str:
        """``nvml`` or ``cudaMemGetInfo``."""
        return "nvml" if self._nvml is not None else "cudaMemGetInfo"

    @property
    def sees_baseline(self) -> bool:
        """Whether it can be read before the process has a context."""
        return self._nvml is not None

    def used_bytes(self) -> int:
        """Bytes in use now."""
        if self._nvml is not None:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(total - free)


def _open_nvml() -> tuple[Any, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(_physical_index())
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except Exception:  # not installed, no driver, or a driver without the call
        return None, None
    return pynvml, handle


def _physical_index() -> int:
    """The card that CUDA calls 0, among those that NVML counts."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _driver_version(nvml: Any) -> str:
    if nvml is None:
        return ""
    version = nvml.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)
