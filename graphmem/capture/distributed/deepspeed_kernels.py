"""DeepSpeed's own kernels, which it compiles when they are first used: by what they take from the allocator.

A capture compiles nothing. Each function here stands for the one of its name in ``deepspeed/ops/csrc`` (0.19) and makes
what that makes: updates of optimizers on the card or the host take nothing, quantised copies and scales are tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from graphmem.capture.device.watched_imports import watched_imports
from graphmem.capture.patches import Patches
from graphmem.errors import CaptureError

_BUILDERS = "deepspeed.ops.op_builder.builder"


@contextlib.contextmanager
def deepspeed_kernels() -> Iterator[None]:
    """DeepSpeed finds its kernels compiled, for the duration."""
    patches = Patches()

    def follow() -> None:
        module = sys.modules.get(_BUILDERS)
        if module is not None:
            patches.set(module.OpBuilder, "load", _load)

    def execute(run: Callable[[], None]) -> None:
        run()
        follow()

    try:
        follow()
        with watched_imports(patches.threads, {_BUILDERS: execute}):
            yield
    finally:
        patches.undo()


def _load(self: Any, verbose: bool = False) -> Any:
    del verbose
    made = _KERNELS.get(self.name)
    if made is None:
        raise CaptureError(
            f"DeepSpeed's kernels {self.name!r} are not modelled; those that are: {', '.join(sorted(_KERNELS))}. Choose "
            "an option that does without them"
        )
    return made()


def _nothing(*_: Any) -> None:
    """In place, or on the host."""


def _lamb(p: torch.Tensor, *_: Any) -> torch.Tensor:
    """Two partial norms of 512 numbers and the coefficient, which is returned (``lamb/fused_lamb_cuda.cpp``)."""
    dtype = torch.float32 if p.dtype is torch.float16 else p.dtype
    norms = [torch.empty(512, dtype=dtype, device=p.device) for _ in range(2)]
    coefficient = torch.empty(1, dtype=dtype, device=p.device)
    del norms
    return coefficient


# --- quantisation (quantization/pt_binding.cpp) ---

_SYMMETRIC, _ASYMMETRIC = 0, 1


def _scales(groups: int, kind: int, device: torch.device) -> torch.Tensor:
    return torch.empty(groups, 2 if kind == _ASYMMETRIC else 1, dtype=torch.float32, device=device)


def _quantize(values: torch.Tensor, groups: int, bits: int, kind: int) -> list[torch.Tensor]:
    scales = _scales(groups, kind, values.device)
    shape = (*values.shape[:-1], values.shape[-1] // (1 if bits == 8 else 2))
    return [torch.empty(shape, dtype=torch.int8, device=values.device), scales]


def _dequantize_to(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def dequantize(values: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int) -> torch.Tensor:
        del scales, groups, kind
        shape = (*values.shape[:-1], values.shape[-1] * (1 if bits == 8 else 2))
        return torch.empty(shape, dtype=dtype, device=values.device)

    return dequantize


def _swizzle_quant(values: torch.Tensor, groups: int, bits: int, kind: int, *_: int) -> list[torch.Tensor]:
    scales = _scales(groups, kind, values.device)
    return [torch.empty(values.numel() // (8 // bits), dtype=torch.int8, device=values.device), scales]


def _quantized_reduction(
    values: torch.Tensor, scales: torch.Tensor, groups: int, out_groups: int, bits: int, kind: int, on_node: int
) -> list[torch.Tensor]:
    del scales, groups, bits
    made = _scales(out_groups, kind, values.device)
    shape = (*values.shape[:-1], values.shape[-1] // on_node)
    return [torch.empty(shape, dtype=torch.int8, device=values.device), made]


def _dequantize_half(values: torch.Tensor, scales: Any, least: Any, groups: int, size: int) -> torch.Tensor:
    del scales, least
    return torch.empty(groups, size, dtype=torch.float16, device=values.device)


def _quantizer() -> Any:
    return SimpleNamespace(
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


def _functions(*names: str) -> Callable[[], Any]:
    return lambda: SimpleNamespace(**dict.fromkeys(names, _nothing))


#: By the name of the builder (``deepspeed/ops/op_builder``).
_KERNELS: dict[str, Callable[[], Any]] = {
    "fused_adam": _functions("multi_tensor_adam"),
    "fused_lion": _functions("multi_tensor_lion"),
    "fused_lamb": lambda: SimpleNamespace(lamb=_lamb),
    "cpu_adam": _functions("create_adam", "destroy_adam", "adam_update", "adam_rollback"),
    "cpu_adagrad": _functions("create_adagrad", "destroy_adagrad", "adagrad_update"),
    "cpu_lion": _functions("create_lion", "destroy_lion", "lion_update"),
    "quantizer": _quantizer,
}
