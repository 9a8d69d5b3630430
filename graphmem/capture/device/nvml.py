"""NVML as a program finds it by its Python bindings: the pretended card, and nothing else on the machine.

Every copy of the bindings (``pynvml`` of the package ``nvidia-ml-py``, and those that libraries bring) asks two private
functions of its own for the library and for what is in it, and hands those C's arguments: numbers come back by
pointers, names in buffers, structures field by field. Questions that are not answered here are "not supported", which
the bindings raise as NVML's error, as beside cards without the feature.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from graphmem.capture.device.pretend_device import ShownCard, cards
from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches, constant

#: Modules that are copies of the bindings.
BINDINGS = ("pynvml", "vllm.third_party.pynvml")
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED = 0, 2, 3
_UUID = "GPU-00000000-0000-0000-0000-{:012d}"
_DRIVER_VERSION, _CUDA_VERSION = "580.95.05", 13000


@contextlib.contextmanager
def nvml_of_card(shown_card: ShownCard) -> Iterator[None]:
    """Let NVML's Python bindings answer for the card until the end."""
    library = _Library(shown_card)

    def follow(patches: Patches, module: ModuleType) -> None:
        patches.where_found(
            (module,), {"_LoadNvmlLibrary": constant(None), "_nvmlGetFunctionPointer": library.function}
        )

    with patched_imports(dict.fromkeys(BINDINGS, follow)):
        yield


class _Library:
    """The functions of ``libnvidia-ml.so.1``, by their names with or without the version at the end."""

    def __init__(self, shown_card: ShownCard) -> None:
        self._shown_card = shown_card

    def function(self, name: str) -> Callable[..., int]:
        """The function of this name; its result is NVML's code."""
        asked = name.removeprefix("nvml").partition("_v")[0]
        found: Callable[..., int] = getattr(self, f"_{asked}", lambda *_: _NOT_SUPPORTED)
        return found

    def _InitWithFlags(self, *_: object) -> int:  # noqa: N802 - these are NVML's names
        return _SUCCESS

    _Init = _Shutdown = _InitWithFlags

    def _SystemGetDriverVersion(self, text: Any, _: object) -> int:  # noqa: N802
        return _say(text, _DRIVER_VERSION)

    def _SystemGetCudaDriverVersion(self, version: Any) -> int:  # noqa: N802
        return _give(version, _CUDA_VERSION)

    def _DeviceGetCount(self, count: Any) -> int:  # noqa: N802
        return _give(count, cards().count)

    def _DeviceGetHandleByIndex(self, index: Any, handle: Any) -> int:  # noqa: N802
        number = int(getattr(index, "value", index))
        if not 0 <= number < cards().count:
            return _INVALID_ARGUMENT
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = number + 1  # 0 would be no handle
        return _SUCCESS

    def _DeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> int:  # noqa: N802
        text = getattr(uuid, "value", uuid)
        end = (text.decode() if isinstance(text, bytes) else str(text)).rpartition("-")[2]
        return self._DeviceGetHandleByIndex(int(end) if end.isdigit() else -1, handle)

    def _DeviceGetIndex(self, handle: Any, index: Any) -> int:  # noqa: N802
        return _give(index, _number(handle))

    def _DeviceGetName(self, _: object, text: Any, __: object) -> int:  # noqa: N802
        return _say(text, self._shown_card.name())

    def _DeviceGetUUID(self, handle: Any, text: Any, _: object) -> int:  # noqa: N802
        return _say(text, _UUID.format(_number(handle)))

    def _DeviceGetCudaComputeCapability(self, _: object, major: Any, minor: Any) -> int:  # noqa: N802
        of_card = self._shown_card.card.capability
        return _give(major, of_card[0]) or _give(minor, of_card[1])

    def _DeviceGetMemoryInfo(self, _: object, memory: Any) -> int:  # noqa: N802
        free, total = torch.cuda.mem_get_info()
        found = memory._obj
        found.total, found.free, found.used = total, free, total - free
        return _SUCCESS

    def _DeviceGetP2PStatus(self, _: object, __: object, ___: object, status: Any) -> int:  # noqa: N802
        return _give(status, 0)

    def _DeviceGetUtilizationRates(self, _: object, rates: Any) -> int:  # noqa: N802
        rates._obj.gpu = rates._obj.memory = 0
        return _SUCCESS

    def _DeviceGetPowerUsage(self, _: object, value: Any) -> int:  # noqa: N802
        return _give(value, 0)

    def _DeviceGetTemperature(self, _: object, __: object, value: Any) -> int:  # noqa: N802
        return _give(value, 0)

    _DeviceGetClockInfo = _DeviceGetTemperature

    def _DeviceGetComputeRunningProcesses(self, _: object, count: Any, __: object) -> int:  # noqa: N802
        return _give(count, 0)

    _DeviceGetGraphicsRunningProcesses = _DeviceGetComputeRunningProcesses


def _give(pointer: Any, value: int) -> int:
    pointer._obj.value = value
    return _SUCCESS


def _say(buffer: Any, text: str) -> int:
    buffer.value = text.encode()
    return _SUCCESS


def _number(handle: Any) -> int:
    """The card of a handle."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1
