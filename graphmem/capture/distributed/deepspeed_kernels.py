"""DeepSpeed's own kernels, which it compiles when they are first used: by the memory they take from the allocator.

A capture compiles nothing. Each function here stands for the one of its name in ``deepspeed/ops/csrc`` (0.19) and makes
the same tensors: updates of optimizers on the card or the host take nothing, quantised copies and scales are tensors,
buffers for NVMe are host memory, and bytes written there are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches, constant
from graphmem.capture.record.recorder import Recorder
from graphmem.errors import CaptureError
from graphmem.units import format_bytes

_BUILDERS = "deepspeed.ops.op_builder.builder"


@contextlib.contextmanager
def deepspeed_kernels(book: Recorder) -> Iterator[None]:
    """DeepSpeed finds its kernels compiled, for the duration. ``book`` notes the bytes kept on NVMe."""
    files: dict[str, int] = {}  # by path, in bytes
    disk = SimpleNamespace(aio_handle=lambda *_, **__: _Disk(files))
    kernels = {**_KERNELS, "async_io": disk}

    def load(self: Any, verbose: bool = False) -> SimpleNamespace:
        if self.name not in kernels:
            known = ", ".join(sorted(kernels))
            raise CaptureError(
                f"DeepSpeed's kernels {self.name!r} are not modelled; those that are: {known}. Choose an option that "
                "does without them"
            )
        return kernels[self.name]

    def follow(patches: Patches, module: ModuleType) -> None:
        patches.set(module.OpBuilder, "load", load)

    with patched_imports({_BUILDERS: follow}):
        yield
    if files:
        book.note_once(f"{format_bytes(sum(files.values()))} of this process are on NVMe (DeepSpeed's offload)")


def _lamb(p: torch.Tensor, *_: object) -> torch.Tensor:
    """Two partial norms of 512 numbers and the coefficient, which is returned (``lamb/fused_lamb_cuda.cpp``)."""
    dtype = torch.float32 if p.dtype is torch.float16 else p.dtype
    norms = [torch.empty(512, dtype=dtype, device=p.device) for _ in range(2)]
    coefficient = torch.empty(1, dtype=dtype, device=p.device)
    del norms
    return coefficient


# --- quantisation (quantization/pt_binding.cpp) ---

_SYMMETRIC, _ASYMMETRIC = 0, 1


def _quantized(values: torch.Tensor, shape: Sequence[int], groups: int, kind: int) -> list[torch.Tensor]:
    """Whole numbers of a byte, after their scales."""
    scales = torch.empty(groups, 2 if kind == _ASYMMETRIC else 1, dtype=torch.float32, device=values.device)
    return [torch.empty(shape, dtype=torch.int8, device=values.device), scales]


def _quantize(values: torch.Tensor, groups: int, bits: int, kind: int) -> list[torch.Tensor]:
    return _quantized(values, (*values.shape[:-1], values.shape[-1] // (1 if bits == 8 else 2)), groups, kind)


def _dequantize_to(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def dequantize(values: torch.Tensor, _: torch.Tensor, __: int, bits: int, ___: int) -> torch.Tensor:
        shape = (*values.shape[:-1], values.shape[-1] * (1 if bits == 8 else 2))
        return torch.empty(shape, dtype=dtype, device=values.device)

    return dequantize


def _swizzle_quant(values: torch.Tensor, groups: int, bits: int, kind: int, *_: int) -> list[torch.Tensor]:
    return _quantized(values, [values.numel() // (8 // bits)], groups, kind)


def _quantized_reduction(
    values: torch.Tensor, _: torch.Tensor, __: int, out_groups: int, ___: int, kind: int, on_node: int
) -> list[torch.Tensor]:
    return _quantized(values, (*values.shape[:-1], values.shape[-1] // on_node), out_groups, kind)


def _dequantize_half(values: torch.Tensor, _: torch.Tensor, __: object, groups: int, size: int) -> torch.Tensor:
    return torch.empty(groups, size, dtype=torch.float16, device=values.device)


_QUANTIZER = SimpleNamespace(
    Symmetric=_SYMMETRIC,
    Asymmetric=_ASYMMETRIC,
    quantize=_quantize,
    dequantize=_dequantize_to(torch.float16),
    dequantize_fp32=_dequantize_to(torch.float32),
    dequantize_int4_to_half_experimental=_dequantize_half,
    dequantize_int8_to_half_experimental=_dequantize_half,
    swizzle_quant=_swizzle_quant,
    quantized_reduction=_quantized_reduction,
)


# --- NVMe (aio/py_lib, pin_memory) ---


class _Locked:
    """Host memory that is locked page by page, without CUDA (``pin_memory/ds_pin_memory.cpp``)."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(count, dtype=like.dtype, device="cpu")
        self._storages.add(made.untyped_storage().data_ptr())
        return made

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        self._storages.discard(tensor.untyped_storage().data_ptr())
        return True

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        self._storages.discard(address)
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages or tensor.is_pinned()


class _Disk(_Locked):
    """Reads and writes are done when they are waited for; ``files`` takes the written bytes."""

    def __init__(self, files: dict[str, int]) -> None:
        super().__init__()
        self._files, self._waiting = files, 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, *_: int) -> int:
        self._files[str(path)] = buffer.numel() * buffer.element_size()
        self._waiting += 1
        return 0

    def async_pread(self, buffer: torch.Tensor, path: str, *_: int) -> int:
        self._waiting += 1
        return 0

    def sync_pwrite(self, buffer: torch.Tensor, path: str, *_: int) -> int:
        self._files[str(path)] = buffer.numel() * buffer.element_size()
        return 1

    def sync_pread(self, buffer: torch.Tensor, path: str, *_: int) -> int:
        return 1

    def wait(self) -> int:
        done, self._waiting = self._waiting, 0
        return done


def _functions(*names: str) -> SimpleNamespace:
    """Functions that work in place, or on the host."""
    return SimpleNamespace(**dict.fromkeys(names, constant(None)))


#: By the name of the builder (``deepspeed/ops/op_builder``).
_KERNELS = {
    "fused_adam": _functions("multi_tensor_adam"),
    "fused_lion": _functions("multi_tensor_lion"),
    "fused_lamb": SimpleNamespace(lamb=_lamb),
    "cpu_adam": _functions("create_adam", "destroy_adam", "adam_update", "adam_rollback"),
    "cpu_adagrad": _functions("create_adagrad", "destroy_adagrad", "adagrad_update"),
    "cpu_lion": _functions("create_lion", "destroy_lion", "lion_update"),
    "quantizer": _QUANTIZER,
    "pin_memory": SimpleNamespace(pin_handle=_Locked),
}
