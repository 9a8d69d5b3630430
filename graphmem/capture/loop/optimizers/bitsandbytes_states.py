"""The optimizers of bitsandbytes, for machines that do not have it: which states there are, how large, and where.

One kernel per tensor updates everything in place, so an optimizer's memory is its states. States of 8 bits have one
fp32 scale per block of 256 values and share a table of 256 fp32 values for each kind of state (signed and unsigned);
tensors below ``min_8bit_size`` keep fp32 states. Paged states are allocated by the CUDA driver as managed memory,
outside PyTorch's allocator, and only for tensors of at least 100,000 values.

Source: ``bitsandbytes/optim/optimizer.py`` (``Optimizer2State``, ``Optimizer1State``, ``get_state_buffer``),
``optim/ademamix.py``, ``backends/cuda/ops.py`` (types of gradients) and ``functional.py`` (``get_paged``) of 0.50.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.record.dispatch import RecordingMode
from graphmem.capture.torch_internals import dispatch_modes
from graphmem.capture.values.tensors import HALF_TYPES
from graphmem.errors import CaptureError
from graphmem.trace import Place

#: Values that share a scale (``blocksize`` in ``init_state``).
BLOCK = 256
#: Smallest tensor whose states are paged (``get_state_buffer``).
PAGED_VALUES = 100_000
_MINIMUM_8BIT = 4096


@dataclass(frozen=True)
class _Family:
    """``states`` per parameter; ``bf16``: the kernel for fp32 states takes such gradients."""

    states: int
    bf16: bool = True


_FAMILIES = {
    "Adam": _Family(2),
    "AdamW": _Family(2),
    "AdEMAMix": _Family(2),
    "Lion": _Family(1),
    "SGD": _Family(1, bf16=False),
    "RMSprop": _Family(1, bf16=False),
    "Adagrad": _Family(1, bf16=False),
}


class QuantizedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """The states of a class of ``bitsandbytes.optim`` by its name: ``AdamW8bit``, ``PagedLion32bit``.

    Options that change no byte are accepted and not used. Raises :class:`ValueError` for refused options.
    """

    def __init__(
        self, name: str, params: Iterable[object], min_8bit_size: int = _MINIMUM_8BIT, **options: object
    ) -> None:
        self.name = name
        self.paged = name.startswith("Paged")
        self.bits = 8 if name.endswith("8bit") else 32
        base = name.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
        self.family = _FAMILIES[base]
        # AdEMAMix32bit does not go through AdEMAMix.init_state, which doubles the first state.
        self.doubled = base == "AdEMAMix" and not name.endswith("32bit")
        self.min_8bit_size = min_8bit_size
        _check_options(base, options)
        self._tables: list[Tensor] = []
        super().__init__(params, {"lr": options.get("lr", 1e-3)})
        if self.bits == 8:
            self._tables = [torch.linspace(-1.0, 1.0, 256), torch.linspace(0.0, 1.0, 256)]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], object] | None = None) -> None:
        """One update of every parameter that has a gradient, with a synchronization after each."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._check_type(parameter)
                    state.update(self._new_state(parameter))
                parameter.data = parameter.data.contiguous()
                parameter.grad = parameter.grad.contiguous()
                torch.cuda.synchronize()

    def _check_type(self, parameter: Tensor) -> None:
        """Raise :class:`CaptureError` for gradients that the kernel of this tensor does not take."""
        half = HALF_TYPES if self._is_quantized(parameter) or self.family.bf16 else HALF_TYPES[:1]
        if parameter.dtype not in (torch.float32, *half):
            what = f"{parameter.dtype} gradients".removeprefix("torch.")
            hint = ""
            if parameter.dtype is torch.bfloat16 and self.bits == 8:
                hint = f" for tensors below {self.min_8bit_size} values, whose states are fp32"
            raise CaptureError(f"bitsandbytes.optim.{self.name} has no kernel for {what}{hint}")

    def _is_quantized(self, parameter: Tensor) -> bool:
        return self.bits == 8 and parameter.numel() >= self.min_8bit_size

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        if not self._is_quantized(parameter):
            return self._buffers(parameter, torch.float32)
        count = self.family.states
        self._tables[:count] = [table.to(parameter.device) for table in self._tables[:count]]
        if self.doubled:  # AdEMAMix makes the scales first
            scales = self._scales(parameter)
            return {**self._buffers(parameter, torch.uint8), **scales}
        buffers = self._buffers(parameter, torch.uint8)
        return {**buffers, **self._scales(parameter)}

    def _buffers(self, parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            f"state{number}": self._buffer(parameter, dtype, doubled=self.doubled and number == 1)
            for number in range(1, self.family.states + 1)
        }

    def _buffer(self, parameter: Tensor, dtype: torch.dtype, doubled: bool) -> Tensor:
        shape = (2, *parameter.shape) if doubled else tuple(parameter.shape)
        if self.paged and parameter.numel() >= PAGED_VALUES:
            return managed_memory(shape, dtype)
        if doubled:
            return torch.zeros(shape, dtype=dtype, device=parameter.device)
        return torch.zeros_like(parameter, dtype=dtype)

    def _scales(self, parameter: Tensor) -> dict[str, Tensor]:
        blocks = -(-parameter.numel() // BLOCK)
        first = (2, blocks) if self.doubled else (blocks,)
        shapes = [first, (blocks,)][: self.family.states]
        return {
            f"absmax{number}": torch.zeros(shape, device=parameter.device)
            for number, shape in enumerate(shapes, start=1)
        }


def _check_options(base: str, options: dict[str, object]) -> None:
    """Refuse the options that the constructors refuse (``optim/sgd.py``, ``rmsprop.py``, ``adagrad.py``)."""
    if base == "SGD" and options.get("momentum", 0) == 0:
        raise ValueError("SGD without momentum is not supported! (give --optimizer-arg momentum=0.9)")
    if base == "RMSprop" and options.get("alpha", 0.99) == 0:
        raise ValueError("RMSprop with alpha==0.0 is not supported!")
    if base == "RMSprop" and options.get("centered", False):
        raise ValueError("Centered RMSprop is not supported!")
    if base == "Adagrad" and options.get("initial_accumulator_value", 0) != 0:
        raise ValueError("Initial accumulator value != 0.0 not supported!")
    if base == "Adagrad" and options.get("lr_decay", 0) != 0:
        raise ValueError("Lr Decay != 0.0 not supported!")


def managed_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in managed memory (``cudaMallocManaged``), noted as such in the running capture: allocated by the
    driver, moved between host and card page by page, unknown to PyTorch's allocator. To Python it lies on the host, as
    ``torch.frombuffer`` makes it."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    for mode in dispatch_modes():
        if isinstance(mode, RecordingMode):
            mode.recorder.storages.place(tensor, Place.MANAGED)
    return tensor
