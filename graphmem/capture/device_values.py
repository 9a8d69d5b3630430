"""Values of scalars on the device that are known all the same, and what is assumed of the others.

A learning rate kept in a tensor on the card was copied from a number: comparing it with another number has a known
answer, and the optimizers ask (``if not 0.0 <= lr``). Everything else that a training loop reads back is data; a
harmless constant is assumed, and counted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
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
#: The condition on the curvature in a line search (``torch/optim/lbfgs.py``), which a descent meets.
_CURVATURE = _aten.le.Tensor
#: Operators whose outcome can be known.
TRACKED = _COPIES | set(_COMPARISONS) | {_CURVATURE}

#: Code that reads the device in order to decide when to stop: an assumed value could keep it going for ever.
_DECIDES = ("transformers/generation/utils.py",)


#: Losses of the descents that go on now, the innermost last; and how large other values are.
_descents: list[Iterator[float]] = []
_MAGNITUDE = 0.5


@contextlib.contextmanager
def descending() -> Iterator[None]:
    """Until the end, numbers read from the device fall, and comparisons have the outcome of a descent that goes on."""
    losses = itertools.chain([1.0], (_MAGNITUDE - 1e-6 * count for count in itertools.count()))
    _descents.append(losses)
    try:
        yield
    finally:
        _descents.pop()


def follow(func: Any, args: Sequence[Any], out: Any) -> None:
    """Note the value of ``out`` if it follows from known ones. ``func`` is one of :data:`TRACKED`."""
    source = args[0]
    if not isinstance(out, FakeTensor) or out.dim() or not isinstance(source, torch.Tensor) or out.is_inference():
        return
    value = known(source)
    compare = _COMPARISONS.get(func)
    if value is None and _descents:
        if func is _CURVATURE:
            out._graphmem_value = (True, out._version)
            return
        # Norms and curvatures exceed tolerances, which are positive; a slope is below its negative one.
        value = math.copysign(_MAGNITUDE, args[1]) if compare is not None else None
    if value is None:
        return
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
    if _descents and tensor.is_floating_point():
        return next(_descents[-1])
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
