"""Reads of a fake tensor's data by Python, outside PyTorch's dispatcher: numpy, lists, text, formatted numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor, disable_current_modes
from graphmem.capture.values.assumed_values import AssumedValues
from graphmem.capture.values.host_values import LIMIT
from graphmem.capture.values.known_values import KnownValues
from graphmem.torch_names import private

if TYPE_CHECKING:
    from numpy.typing import NDArray

_in_meta_kernel: Any = private(
    "torch._C._meta_in_tls_dispatch_include", "errors of operators may be worded otherwise", lambda: False
)
_Read = Callable[..., Any]


def patch_reading(patches: Patches, values: KnownValues, assumed: AssumedValues) -> None:
    """Let programs read the known values of a tensor; else each element is the value that ``.item()`` would assume.

    An array shares its memory with the host tensor that it is of, as PyTorch's does.
    """
    reading = _Reading(values, assumed)
    functions: dict[str, Callable[..., object]] = {
        "numpy": reading.numpy,
        "tolist": reading.to_list,
        "item": reading.item,
        "__repr__": reading.repr,
        "__format__": _format,
        "__reduce_ex__": reading.reduce,
        "__bool__": reading.by("bool"),
        "__int__": reading.by("int"),
        "__index__": reading.by("index"),
    }
    patches.around(torch.Tensor, functions)


class _Reading:
    """Methods of tensors, each with PyTorch's own as its first argument, where ``values`` are known or ``assumed``."""

    def __init__(self, values: KnownValues, assumed: AssumedValues) -> None:
        self._values, self._assumed = values, assumed

    def numpy(self, original: _Read, tensor: torch.Tensor, *, force: bool = False) -> NDArray[Any]:
        """``Tensor.numpy``."""
        if not isinstance(tensor, FakeTensor):
            return original(tensor, force=force)  # type: ignore[no-any-return]
        if force:
            tensor = tensor.detach().cpu()
        if tensor.is_cuda:
            raise TypeError(f"can't convert a tensor on {tensor.device} to numpy; call .cpu() first")
        if tensor.requires_grad:
            raise RuntimeError("can't call numpy() on a tensor that requires a gradient; call .detach() first")
        known = self._values.of(tensor)
        if known is None:
            array = self._any(tensor)
            if tensor.is_floating_point():
                self._assumed.array(True, False)
            return array
        if self._values.drawn([tensor]):
            self._assumed.array(tensor.is_floating_point(), True)
        return _without_modes(original, known)  # type: ignore[no-any-return]

    def to_list(self, original: _Read, tensor: torch.Tensor) -> object:
        """``Tensor.tolist``. Numbers that nobody knows, or that were drawn on the card: floating-point ones note
        themselves what they decide, for the others their line does."""
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        known = self._values.of(tensor)
        numbers = self._any(tensor).tolist() if known is None else _without_modes(original, known)
        if known is not None:
            if not self._values.drawn([tensor]):
                return numbers
            self._assumed.drawn_list(known.is_floating_point())
        return self._assumed.as_last(numbers) if tensor.is_floating_point() and tensor.numel() <= LIMIT else numbers

    def _any(self, tensor: torch.Tensor) -> NDArray[Any]:
        """An array of the values that are assumed: of an order, which has every place once, different ones."""
        import numpy

        array = _assumed(tensor)
        possible = None if self._assumed.is_given() else self._values.numbers.possible(tensor)
        return array if possible is None else numpy.asarray(possible, array.dtype)

    def item(self, original: _Read, tensor: torch.Tensor) -> object:
        """``Tensor.item``."""
        return self._assumed.followed(lambda: original(tensor))

    def by(self, how: str) -> Callable[..., object]:
        """The function that replaces ``bool(tensor)`` and its like: it reads a value as ``how``."""

        def read(original: _Read, tensor: torch.Tensor) -> object:
            with self._assumed.reading(how):
                return original(tensor)

        return read

    def repr(self, original: _Read, tensor: torch.Tensor, *, tensor_contents: object = None) -> str:
        """``repr(tensor)``. The arguments of an overload that is not the one that was meant are written out, inside a
        meta kernel."""
        is_shown = isinstance(tensor, FakeTensor) and tensor_contents is None
        known = self._values.of(tensor) if is_shown and not _in_meta_kernel() else None
        if known is None:
            return str(original(tensor, tensor_contents=tensor_contents))
        text = str(_without_modes(original, known))
        return text if not tensor.is_cuda else f"{text[:-1]}, device='{tensor.device}')"

    def reduce(self, original: _Read, tensor: torch.Tensor, protocol: int) -> object:
        """Pickling."""
        is_host = isinstance(tensor, FakeTensor) and not tensor.is_cuda
        known = self._values.of(tensor) if is_host and not self._values.is_weight(tensor) else None
        if known is None:
            return original(tensor, protocol)
        with disable_current_modes():
            data = bytearray(known.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return _rebuilt, (data, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _without_modes(read: _Read, known: torch.Tensor) -> Any:
    """``read`` of a real tensor, which no mode sees."""
    with disable_current_modes():
        return read(known)


def _assumed(tensor: torch.Tensor) -> NDArray[Any]:
    """An array of the values assumed for each element."""
    import numpy

    is_half = tensor.dtype is torch.bfloat16  # numpy has none
    dtype = numpy.dtype("float32" if is_half else str(tensor.dtype).removeprefix("torch."))
    if tensor.numel() == 0:
        return numpy.empty(tuple(tensor.shape), dtype)
    value = numpy.asarray(tensor.new_empty(()).item(), dtype)
    array = numpy.broadcast_to(value, tuple(tensor.shape))
    return array.copy() if tensor.numel() <= LIMIT else array


def _rebuilt(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A host tensor of pickled bytes."""
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def _format(original: _Read, tensor: torch.Tensor, spec: str) -> str:
    if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
        return format(tensor.detach().item(), spec)
    return str(original(tensor, spec))
