"""What Python reads of a fake tensor's data, outside PyTorch's dispatcher: numpy, lists, text, formatted numbers."""

from __future__ import annotations

from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor, disable_current_modes
from graphmem.capture.values.assumed_values import AssumedValues
from graphmem.capture.values.host_values import LIMIT
from graphmem.capture.values.known_values import KnownValues
from graphmem.torch_names import private


def patch_reading(patches: Patches, values: KnownValues, assumed: AssumedValues) -> None:
    """Let programs read what is known of a tensor; of any other, what ``.item()`` would assume stands for each element.

    An array shares its memory with the host tensor that it is of, as PyTorch's does.
    """
    patches.set(torch.Tensor, "numpy", _numpy(torch.Tensor.numpy, values, assumed))
    patches.set(torch.Tensor, "tolist", _to_list(torch.Tensor.tolist, values, assumed))
    patches.set(torch.Tensor, "__repr__", _repr(torch.Tensor.__repr__, values))
    patches.set(torch.Tensor, "__format__", _format(torch.Tensor.__format__))
    patches.set(torch.Tensor, "__reduce_ex__", _reduce(torch.Tensor.__reduce_ex__, values))
    item = torch.Tensor.item
    patches.set(torch.Tensor, "item", lambda self: assumed.followed(lambda: item(self)))
    for name, how in (("__bool__", "bool"), ("__int__", "int"), ("__index__", "index")):
        patches.set(torch.Tensor, name, _read_as(getattr(torch.Tensor, name), how, assumed))


def _numpy(original: Any, values: KnownValues, assumed: AssumedValues) -> Any:
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, force=force)
        if force:
            self = self.detach().cpu()
        if self.is_cuda:
            raise TypeError(f"can't convert a tensor on {self.device} to numpy; call .cpu() first")
        if self.requires_grad:
            raise RuntimeError("can't call numpy() on a tensor that requires a gradient; call .detach() first")
        known = values.of(self)
        if known is None:
            array = _assumed(self)
            if self.is_floating_point():
                assumed.array(True, False)
            return array
        if values.drawn([self]):
            assumed.array(self.is_floating_point(), True)
        with disable_current_modes():
            return original(known)

    return numpy


def _assumed(tensor: torch.Tensor) -> Any:
    """An array of what is assumed of each element."""
    import numpy

    is_half = tensor.dtype is torch.bfloat16  # numpy has none
    dtype = numpy.dtype("float32" if is_half else str(tensor.dtype).removeprefix("torch."))
    if tensor.numel() == 0:
        return numpy.empty(tuple(tensor.shape), dtype)
    value = numpy.asarray(tensor.new_empty(()).item(), dtype)
    array = numpy.broadcast_to(value, tuple(tensor.shape))
    return array.copy() if tensor.numel() <= LIMIT else array


def _to_list(original: Any, values: KnownValues, assumed: AssumedValues) -> Any:
    def tolist(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self)
        known = values.of(self)
        if known is None or values.drawn([self]):
            return _followed_list(self, known, original, assumed)
        with disable_current_modes():
            return original(known)

    return tolist


def _followed_list(tensor: torch.Tensor, known: torch.Tensor | None, original: Any, assumed: AssumedValues) -> Any:
    """Numbers that nobody knows, or that were drawn on the card: floating-point ones tell themselves what they decide,
    the others' line does."""
    if known is None:
        numbers = _assumed(tensor).tolist()
    else:
        with disable_current_modes():
            numbers = original(known)
        assumed.drawn_list(known.is_floating_point())
    return assumed.as_last(numbers) if tensor.is_floating_point() and tensor.numel() <= LIMIT else numbers


def _read_as(original: Any, how: str, assumed: AssumedValues) -> Any:
    def read(self: torch.Tensor) -> Any:
        with assumed.reading(how):
            return original(self)

    return read


_in_meta_kernel: Any = private(
    "torch._C._meta_in_tls_dispatch_include", "errors of operators may be worded otherwise", lambda: False
)


def _repr(original: Any, values: KnownValues) -> Any:
    def repr_(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        # The arguments of an overload that is not the one that was meant are written out, inside a meta kernel.
        is_shown = isinstance(self, FakeTensor) and tensor_contents is None
        known = values.of(self) if is_shown and not _in_meta_kernel() else None
        if known is None:
            return str(original(self, tensor_contents=tensor_contents))
        with disable_current_modes():
            text = str(original(known))
        return text if not self.is_cuda else f"{text[:-1]}, device='{self.device}')"

    return repr_


def _reduce(original: Any, values: KnownValues) -> Any:
    def reduce(self: torch.Tensor, protocol: Any) -> Any:
        is_host = isinstance(self, FakeTensor) and not self.is_cuda
        known = values.of(self) if is_host and not values.is_weight(self) else None
        if known is None:
            return original(self, protocol)
        with disable_current_modes():
            data = bytearray(known.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return _rebuilt, (data, self.dtype, tuple(self.shape), self.requires_grad)

    return reduce


def _rebuilt(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A host tensor of pickled bytes."""
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def _format(original: Any) -> Any:
    def format_(self: torch.Tensor, spec: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0:
            return format(self.detach().item(), spec)
        return str(original(self, spec))

    return format_
