"""Values of scalars on the device that are known all the same, and what is assumed of the others.

A learning rate kept in a tensor on the card was copied from a number: comparing it with another number has a known
answer, and the optimizers ask (``if not 0.0 <= lr``). Everything else that a training loop reads back is data; a
harmless constant is assumed, and counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.errors import CaptureError

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.clone.default, _aten.detach.default, _aten.alias.default}
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.ge.Scalar: operator.ge,
    _aten.gt.Scalar: operator.gt,
    _aten.le.Scalar: operator.le,
    _aten.lt.Scalar: operator.lt,
    _aten.eq.Scalar: operator.eq,
    _aten.ne.Scalar: operator.ne,
}
#: Operators whose outcome can be known.
TRACKED = _COPIES | set(_COMPARISONS)

#: Code that reads the device in order to decide when to stop: an assumed value could keep it going for ever.
_DECIDES = ("transformers/generation/utils.py",)


def follow(func: Any, args: Sequence[Any], out: Any) -> None:
    """Note the value of ``out`` if it follows from known ones. ``func`` is one of :data:`TRACKED`."""
    source = args[0]
    if not isinstance(out, FakeTensor) or out.dim() or not isinstance(source, torch.Tensor) or out.is_inference():
        return
    value = known(source)
    if value is None:
        return
    compare = _COMPARISONS.get(func)
    result = value if compare is None else compare(value, args[1])
    out._graphmem_value = (result, out._version)


def known(tensor: torch.Tensor) -> Any:
    """The number that a tensor of one element holds; None where it is not known."""
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return tensor.item() if tensor.device.type == "cpu" and tensor.dim() == 0 else None
    value, version = getattr(tensor, "_graphmem_value", (None, -1))
    return value if value is not None and not tensor.is_inference() and version == tensor._version else None


def assumed(tensor: torch.Tensor) -> float | int | bool:
    """What a training loop reads back for its log: no data exists, so a harmless constant."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def refuse_decisions(frame: FrameType | None) -> None:
    """Raise :class:`CaptureError` when the reader is known to decide by the value how long it goes on."""
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_DECIDES):
            raise CaptureError(
                "model.generate() decides by the generated tokens when to stop, and an analysis has only shapes; write "
                "a step function that calls the model a fixed number of times with past_key_values"
            )
        frame = frame.f_back
