"""Values of scalars on the device that are known all the same, and what is assumed of the others.

A learning rate kept in a tensor on the card was copied from a number: comparing it with another number has a known
answer, and the optimizers ask (``if not 0.0 <= lr``). A tensor filled with a number is known too, and what follows from
such tensors: generation keeps its list of unfinished sequences so.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.capture.values import callers
from graphmem.capture.values.known_values import KnownValues
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError

_aten = torch.ops.aten
#: Operators whose result has the elements of their first argument, in another type or shape.
_COPIES = {
    _aten._to_copy.default, _aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.view.default,
    _aten._unsafe_view.default, _aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.squeeze.default,
    _aten.expand.default,
}  # fmt: skip
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.ge.Scalar: operator.ge,
    _aten.gt.Scalar: operator.gt,
    _aten.le.Scalar: operator.le,
    _aten.lt.Scalar: operator.lt,
    _aten.eq.Scalar: operator.eq,
    _aten.ne.Scalar: operator.ne,
}
#: Operators that fill a tensor with one number.
_FILLS: dict[Any, Callable[..., Any]] = {
    _aten.full.default: lambda size, value, *_: value,
    _aten.ones.default: lambda *_: 1,
    _aten.zeros.default: lambda *_: 0,
}
_AND, _ADD, _TIMES = _aten.bitwise_and.Tensor, _aten.add.Tensor, _aten.mul.Tensor
#: Operators of filled tensors element by element.
_COMBINATIONS: dict[Any, Callable[..., Any]] = {
    _AND: operator.and_,
    _aten.bitwise_or.Tensor: operator.or_,
    _TIMES: operator.mul,
    _ADD: operator.add,
    _aten.logical_and.default: lambda one, other: bool(one) and bool(other),
    _aten.logical_or.default: lambda one, other: bool(one) or bool(other),
    _aten.logical_xor.default: lambda one, other: bool(one) != bool(other),
}
_OR = {_aten.bitwise_or.Tensor, _aten.logical_or.default}
_NOT, _LOGICAL_NOT = _aten.bitwise_not.default, _aten.logical_not.default
#: Operators that keep the value of a filled tensor.
_REDUCTIONS = {
    _aten.max.default, _aten.amax.default, _aten.any.default, _aten.any.dim, _aten.all.default, _aten.all.dim,
    _aten._is_any_true.default, _aten._is_all_true.default,
}  # fmt: skip
#: Whether a token ends its sequence (``transformers/generation/stopping_criteria.py``).
_ENDS = _aten.isin.Tensor_Tensor
#: Of assisted decoding: how many drafted tokens are wrong, up to each of them (``transformers/generation/utils.py``).
_WRONG = _aten.cumsum.default
#: In a beam search: how many of its places every sequence has filled, before it is cut there.
_LENGTHS = _aten.sum.dim_IntList
#: The condition on the curvature in a line search (``torch/optim/lbfgs.py``), which a descent meets.
_CURVATURE = _aten.le.Tensor
#: Questions whether values are finite, and the answer for those that are. ``isfinite`` asks the last two.
_IS_NAN, _IS_INFINITE, _SAME, _OTHER = _aten.isnan.default, _aten.isinf.default, _aten.eq.Tensor, _aten.ne.Tensor
_FINITE = Code.FINITE.about()
#: What the output says of ``torch.distributions``, which looks whether its parameters and samples are in range.
VALID = Code.DISTRIBUTION_VALID.about()
#: What the output says of generation.
GOES_ON = Code.GENERATION_GOES_ON.about()
#: What the output says of assisted decoding, and of hqq's search.
CONFIDENT = Code.DRAFTS_CONFIDENT.about()
ALL_RIGHT = Code.DRAFTS_RIGHT.about()
SOME_RIGHT = Code.DRAFTS_ACCEPTED.about()
ALLOWED = Code.TOKENS_ALLOWED.about()
FITTED = Code.QUANTIZER_FITTED.about()
#: Operators whose outcome can be known.
TRACKED = {
    *_COPIES, *_COMPARISONS, *_FILLS, *_COMBINATIONS, *_REDUCTIONS, _NOT, _LOGICAL_NOT, _ENDS, _LENGTHS, _CURVATURE,
    _WRONG, _IS_NAN, _IS_INFINITE, _SAME, _OTHER,
}  # fmt: skip

#: Elements of the largest tensor of flags.
_FLAGS = 16

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


#: How many drafted tokens of a round are right at the most, in the generation that goes on now; None for all.
_accepted: list[int | None] = [None]


@contextlib.contextmanager
def drafting(accepted: int | None) -> Iterator[None]:
    """Until the end, so many drafted tokens of a round are right; None: all of them."""
    _accepted.append(accepted)
    try:
        yield
    finally:
        _accepted.pop()


#: What library code that runs now is told of values that it reads back, and what the output says of that.
_answers: list[tuple[Any, Diagnostic]] = []


@contextlib.contextmanager
def answering(value: Any, remark: Diagnostic) -> Iterator[None]:
    """Until the end, what is read from the device and is not known is ``value``; ``remark`` tells of it."""
    _answers.append((value, remark))
    try:
        yield
    finally:
        _answers.pop()


def answered() -> tuple[Any, Diagnostic] | None:
    """The innermost answer of :func:`answering` and its remark; None outside of it."""
    return _answers[-1] if _answers else None


def follow(values: KnownValues, func: Any, args: Sequence[Any], out: Any) -> Diagnostic | None:
    """Note the value of every element of ``out`` if it is known. ``func`` is one of :data:`TRACKED`. A flag goes into
    ``values`` too: frameworks add flags up in place, and send them round.

    Returns what had to be assumed for it, or None.
    """
    if not isinstance(out, FakeTensor):
        return None
    if func is _WRONG:
        return _drafted(values, args[0], out)
    is_inference = out.is_inference()
    value, remark = _outcome(func, args), None
    if is_inference and value is not None and not callers.called_in_generation_loop():
        return None  # who writes into it is not counted there
    is_check = False
    if value is None:
        value = _if_finite(func, args)
        remark = None if value is None else _FINITE
        is_check = value is not None
    if value is None and func in _OR and any(getattr(arg, "_graphmem_check", False) and not known(arg) for arg in args):
        value, remark, is_check = False, _FINITE, True  # what stands beside a check of finite values is one too
    if value is None and func is _ENDS and callers.called_to_stop_generation():
        value, remark = False, GOES_ON
    if value is None and func is _LENGTHS and args[0].dtype is torch.bool and callers.called_in_generation_loop():
        value, remark = math.prod(args[0].shape[dim] for dim in args[1]), GOES_ON
    if value is not None:
        out._graphmem_value = (value, None if is_inference else out._version)
        if is_check or getattr(args[0], "_graphmem_check", False):
            out._graphmem_check = True
        is_short = out.numel() <= _FLAGS or func is _ENDS
        if is_short and func not in _FILLS and values.of(out) is None:
            values.fill(out, value)
    elif func is _AND and _is_open(args):
        out._graphmem_open = True
    return remark


def _drafted(values: KnownValues, wrong: torch.Tensor, out: FakeTensor) -> Diagnostic | None:
    """Which drafted tokens are wrong: none, or those after so many that are right."""
    if wrong.dtype is not torch.bool or values.of(out) is not None or not callers.called_to_check_draft():
        return None
    accepted = _accepted[-1]
    with unset_fake_temporarily():
        places = torch.arange(1, out.shape[-1] + 1)
        counts = torch.zeros_like(places) if accepted is None else (places - accepted).clamp(min=0)
        values.learn(out, counts.expand(out.shape))
    return ALL_RIGHT if accepted is None else SOME_RIGHT


def expected(tensor: torch.Tensor) -> tuple[Any, Diagnostic] | None:
    """What a loop of a library reads that goes on as long as it can, and what the output says of that; None for what
    others read."""
    is_bool = tensor.dtype is torch.bool
    if callers.called_to_look_up_draft():
        return (False if is_bool else 0), ALLOWED  # or the token that it is asked of
    if is_bool:
        return (True, FITTED) if callers.called_to_fit_quantizer() else None
    if not callers.called_to_ask_confidence(tensor.is_floating_point()):
        return None
    return (1.0 if tensor.is_floating_point() else 0), CONFIDENT  # a probability, or the token that it is asked of


def _is_open(args: Sequence[Any]) -> bool:
    """Whether it is only from here on up to the unknown one of two answers: the other is yes."""
    answers = [known(arg) if isinstance(arg, torch.Tensor) else arg for arg in args[:2]]
    return answers.count(None) == 1 and bool(answers[answers[0] is None])


def goes_on(tensor: torch.Tensor) -> bool:
    """Whether a generation that reads this value is not over by its length, and goes on unless its tokens end it:
    transformers' beam search asks for ``improvement_possible & exists_open_beam & valid_continuations``, and the last
    one is known to be false at the largest length."""
    return getattr(tensor, "_graphmem_open", False) and callers.called_in_generation_loop()


def _outcome(func: Any, args: Sequence[Any]) -> Any:
    """The value of the result's elements; None where it is not known."""
    fill = _FILLS.get(func)
    if fill is not None:
        return fill(*args)
    source = args[0]
    if not isinstance(source, torch.Tensor):
        return None
    value = known(source)
    if func in _COMBINATIONS:
        other = known(args[1]) if isinstance(args[1], torch.Tensor) else args[1]
        if func is _AND and (value is False or other is False):
            return False
        if func is _TIMES and 0 in (value, other) and not _is_float(args):
            return 0
        return None if value is None or other is None else _COMBINATIONS[func](value, other)
    compare = _COMPARISONS.get(func)
    if value is None and _descents:
        if func is _CURVATURE:
            return True
        # Norms and curvatures exceed tolerances, which are positive; a slope is below its negative one.
        value = math.copysign(_MAGNITUDE, args[1]) if compare is not None else None
    if value is None or func is _CURVATURE or func is _ENDS:
        return None
    if func is _LOGICAL_NOT:
        return not value
    if func is _NOT:
        return not value if source.dtype is torch.bool else ~value
    return value if compare is None else compare(value, args[1])


def _is_float(args: Sequence[Any]) -> bool:
    return any(arg.is_floating_point() if isinstance(arg, torch.Tensor) else type(arg) is float for arg in args)


def _if_finite(func: Any, args: Sequence[Any]) -> bool | None:
    """The answer to a question whether values are finite, for values that are; None for other questions."""
    if func in (_IS_NAN, _IS_INFINITE):
        return False
    if func in (_SAME, _OTHER):  # only NaN differs from itself
        return func is _SAME if args[0] is args[1] else None
    if func in _COMPARISONS and isinstance(args[1], float) and math.isinf(args[1]):
        return _COMPARISONS[func](0.0, args[1])
    return None


def known(tensor: torch.Tensor) -> Any:
    """The number that every element of the tensor holds; None where it is not known."""
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return tensor.item() if tensor.device.type == "cpu" and tensor.dim() == 0 else None
    value, version = getattr(tensor, "_graphmem_value", (None, -1))
    now = None if tensor.is_inference() else tensor._version  # those are not counted in inference mode
    return value if value is not None and version == now else None


def learn(tensor: torch.Tensor, value: Any) -> None:
    """From now on every element of the tensor is this number."""
    tensor._graphmem_value = (value, None if tensor.is_inference() else tensor._version)


def forget(tensor: torch.Tensor) -> None:
    """The tensor was written into, where PyTorch does not count it."""
    vars(tensor).pop("_graphmem_value", None)


def of_descent(tensor: torch.Tensor) -> float | None:
    """The loss that is read next in a descent; None outside one."""
    return next(_descents[-1]) if _descents and tensor.is_floating_point() else None


def is_validation(tensor: torch.Tensor) -> bool:
    """Whether ``torch.distributions`` reads here whether all values are in range."""
    return tensor.dtype is torch.bool and callers.called_to_validate_distribution()


def refuse_decisions() -> None:
    """Raise :class:`CaptureError` when the reader is known to decide by the value how long it goes on."""
    if callers.called_in_generation_loop():
        raise CaptureError(
            "this way of model.generate() decides by the generated tokens when to stop, and an analysis has only "
            "shapes; use greedy decoding or sampling under torch.no_grad(), or call the model a fixed number of times "
            "with past_key_values"
        )
