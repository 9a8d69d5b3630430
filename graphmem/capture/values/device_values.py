"""Values on the device that are known though nobody computes them: what checks, loops and libraries ask.

Values of small tensors are kept and computed by :class:`KnownValues`. Here are the others. A tensor of any size whose
elements are all one number keeps it, and what follows from such numbers is known too. Questions whose answer every
program that works gives alike are answered so: whether values are finite, whether a generation goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from graphmem.capture.torch_internals import FakeTensor, OpOverload, unset_fake_temporarily
from graphmem.capture.values import callers
from graphmem.capture.values.known_values import KnownValues
from graphmem.capture.values.uniform_numbers import Mark, Number
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError

_T = TypeVar("_T")
_aten = torch.ops.aten
_COMPARISONS: dict[OpOverload, Callable[..., bool]] = {
    _aten.ge.Scalar: operator.ge,
    _aten.gt.Scalar: operator.gt,
    _aten.le.Scalar: operator.le,
    _aten.lt.Scalar: operator.lt,
    _aten.eq.Scalar: operator.eq,
    _aten.ne.Scalar: operator.ne,
}
#: Operators that fill a tensor with one number.
_FILLS: dict[OpOverload, Callable[..., Number]] = {
    _aten.full.default: lambda size, number, *_: number,
    _aten.ones.default: lambda *_: 1,
    _aten.zeros.default: lambda *_: 0,
    _aten.ones_like.default: lambda *_: 1,
    _aten.zeros_like.default: lambda *_: 0,
    _aten.new_zeros.default: lambda *_: 0,
    _aten.new_ones.default: lambda *_: 1,
    _aten.full_like.default: lambda like, number, *_: number,
    _aten.new_full.default: lambda like, size, number, *_: number,
}
_AND, _TIMES, _OR = _aten.bitwise_and.Tensor, _aten.mul.Tensor, _aten.bitwise_or.Tensor
_LOGICAL_OR = _aten.logical_or.default
#: Operators whose result has one number in all its elements if their arguments have: the number, of those.
_ONE_NUMBER: dict[OpOverload, Callable[..., Number]] = {
    **_COMPARISONS,
    **dict.fromkeys(
        (
            _aten._to_copy.default, _aten.clone.default, _aten.max.default, _aten.amax.default, _aten.any.default,
            _aten.any.dim, _aten.all.default, _aten.all.dim, _aten._is_any_true.default, _aten._is_all_true.default,
        ),
        lambda number, *_: number,
    ),
    **_FILLS,
    _AND: operator.and_,
    _OR: operator.or_,
    _TIMES: operator.mul,
    _aten.add.Tensor: operator.add,
    _aten.bitwise_not.default: lambda number: not number if type(number) is bool else ~number,
    _aten.logical_not.default: operator.not_,
    _aten.logical_and.default: lambda one, other: bool(one) and bool(other),
    _LOGICAL_OR: lambda one, other: bool(one) or bool(other),
    _aten.logical_xor.default: lambda one, other: bool(one) != bool(other),
}  # fmt: skip
#: Whether a token ends its sequence (``transformers/generation/stopping_criteria.py``).
_IS_END_TOKEN = _aten.isin.Tensor_Tensor
#: Of assisted decoding: how many drafted tokens are wrong, up to each of them (``transformers/generation/utils.py``).
_COUNT_WRONG_DRAFTS = _aten.cumsum.default
#: In a beam search: how many of its places every sequence has filled, before it is cut there.
_COUNT_FILLED_PLACES = _aten.sum.dim_IntList
#: Of one number in every element, it is so often that number (``attention_mask.sum() == attention_mask.numel()``).
_SUM = _aten.sum.default
#: Floats of fp32 are whole numbers up to here.
_LARGEST_WHOLE = 1 << 24
#: The condition on the curvature in a line search (``torch/optim/lbfgs.py``), which a descent meets.
_CURVATURE_CONDITION = _aten.le.Tensor
#: Questions whether values are finite, and the answer for those that are. ``isfinite`` asks the last two.
_IS_NAN, _IS_INFINITE, _SAME, _OTHER = _aten.isnan.default, _aten.isinf.default, _aten.eq.Tensor, _aten.ne.Tensor
_FINITE = Code.FINITE.about()
#: The remark where ``torch.distributions`` looks whether its parameters and samples are in range.
VALID = Code.DISTRIBUTION_VALID.about()
#: Remarks on generation, on assisted decoding, and on hqq's search.
GOES_ON = Code.GENERATION_GOES_ON.about()
CONFIDENT = Code.DRAFTS_CONFIDENT.about()
ALL_RIGHT = Code.DRAFTS_RIGHT.about()
SOME_RIGHT = Code.DRAFTS_ACCEPTED.about()
ALLOWED = Code.TOKENS_ALLOWED.about()
FITTED = Code.QUANTIZER_FITTED.about()
#: Operators that give places along a dimension: the dimension's argument, and the output they are.
_PLACES: dict[OpOverload, tuple[int, int]] = {
    _aten.argmax.default: (1, 0), _aten.argmin.default: (1, 0), _aten.max.dim: (1, 1), _aten.min.dim: (1, 1),
    _aten.topk.default: (2, 1), _aten.sort.default: (1, 1),
}  # fmt: skip
#: Operators whose output of this number differs from element to element, along the last dimension.
_DISTINCT = {
    _aten.topk.default: 1, _aten.sort.default: 1, _aten.sort.stable: 1, _aten._unique.default: 0,
    _aten._unique2.default: 0,
}  # fmt: skip
_COPIES = {_aten._to_copy.default, _aten.clone.default}
#: Operators whose results are values of their first argument, or of all in it.
_TAKING = {_aten._to_copy.default, _aten.clone.default, _aten.index.Tensor, _aten.cat.default}
#: Operators whose outcome can be known.
TRACKED = {
    *_PLACES, *_DISTINCT, *_TAKING, *_ONE_NUMBER, _SUM, _IS_END_TOKEN, _COUNT_FILLED_PLACES, _CURVATURE_CONDITION,
    _COUNT_WRONG_DRAFTS, _IS_NAN, _IS_INFINITE, _SAME, _OTHER,
}  # fmt: skip

#: Elements of the largest tensor of flags.
_FLAGS = 16

#: Losses of the descents that go on now, the innermost last; and how large other values are.
_descents: list[Iterator[float]] = []
_MAGNITUDE = 0.5
#: How many drafted tokens of a round are right at the most, in the generation that goes on now; None for all.
_accepted: list[int | None] = [None]
#: Answers to library code that runs now and reads unknown values back, with their remarks.
_answers: list[tuple[bool, Diagnostic]] = []


@contextlib.contextmanager
def _during(stack: list[_T], value: _T) -> Iterator[None]:
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


def descending() -> AbstractContextManager[None]:
    """Until the end, numbers read from the device fall, and comparisons have the outcome of a descent that goes on."""
    return _during(_descents, itertools.chain([1.0], (_MAGNITUDE - 1e-6 * count for count in itertools.count())))


def drafting(accepted: int | None) -> AbstractContextManager[None]:
    """Until the end, so many drafted tokens of a round are right; None: all of them."""
    return _during(_accepted, accepted)


def answering(value: bool, remark: Diagnostic) -> AbstractContextManager[None]:
    """Until the end, an unknown value that is read from the device is ``value``, and ``remark`` is noted."""
    return _during(_answers, (value, remark))


def answered() -> tuple[bool, Diagnostic] | None:
    """The innermost answer of :func:`answering` and its remark; None outside of it."""
    return _answers[-1] if _answers else None


def follow(values: KnownValues, func: OpOverload, args: Sequence[object], out: object) -> Diagnostic | None:
    """Note what is known of ``out``, which ``func``, one of :data:`TRACKED`, has returned.

    Flags go into ``values`` as well: frameworks add them up in place, and send them round. Returns what had to be
    assumed, or None.
    """
    if func in _PLACES or func in _TAKING:
        _note_range(values, func, args, out)
    _note_distinct(values, func, args, out)
    if func in _PLACES or not isinstance(out, FakeTensor):
        return None
    if func is _COUNT_WRONG_DRAFTS:
        return _drafted(values, args[0], out)
    is_computed = values.is_known(out)
    number, remark = None if is_computed else _outcome(values, func, args), None
    if number is None:
        number, remark = _assumed(values, func, args)
    if number is None and not is_computed:
        if func is _AND and _is_yes_beside_unknown(values, args):
            values.numbers.set_mark(out, Mark.GOES_ON)
        return remark
    if remark is _FINITE or values.mark_of(args[0]) is Mark.FINITE_CHECK:
        values.numbers.set_mark(out, Mark.FINITE_CHECK)
    if number is not None and not is_computed:
        if func is _IS_END_TOKEN or (out.numel() <= _FLAGS and func not in _FILLS):
            values.fill(out, number)
        values.numbers.learn(out, number)
    return remark


def _note_range(values: KnownValues, func: OpOverload, args: Sequence[Any], out: Any) -> None:
    """Note which whole numbers ``out`` may hold: classes that a model chose are as many as it scores."""
    if func in _PLACES:
        at, which = _PLACES[func]
        dim = args[at] if len(args) > at else -1 if which else None
        shape, places = args[0].shape, out[which] if isinstance(out, (list, tuple)) else out
        values.numbers.set_below(places, math.prod(shape) if dim is None or not shape else shape[dim])
        return
    sources = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    ranges = [values.numbers.below(one) for one in sources if isinstance(one, FakeTensor)]
    known = [one for one in ranges if one is not None]
    if isinstance(out, FakeTensor) and known and len(known) == len(sources):
        values.numbers.set_below(out, max(known))


def _note_distinct(values: KnownValues, func: OpOverload, args: Sequence[Any], out: Any) -> None:
    """Note where ``out`` holds whole numbers that differ: an order is one of all places, each once."""
    if func in _DISTINCT:
        at, taken = _PLACES.get(func, (0, 0))[0], out[_DISTINCT[func]]
        along = args[at] if 0 < at < len(args) else -1
        if taken.dim() == 1 or (taken.dim() and func in _PLACES and along in (-1, taken.dim() - 1)):
            values.numbers.set_distinct(taken)
    elif func in _COPIES and out.dim() and values.numbers.is_distinct(args[0]):
        values.numbers.set_distinct(out)


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


def _outcome(values: KnownValues, func: OpOverload, args: Sequence[object]) -> Number | None:
    """The number in every element of the result; None where it is not known."""
    if func in _FILLS:
        return _FILLS[func](*args)
    if func is _SUM:
        return _sum(values, args[0])
    combine = _ONE_NUMBER.get(func)
    if combine is None:
        return True if func is _CURVATURE_CONDITION and _descents and values.number(args[0]) is None else None
    numbers: list[Any] = [values.number(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if func is _AND and False in [number for number in numbers if type(number) is bool]:
        return False
    if func is _TIMES and 0 in numbers and not any(map(_is_float, args)):
        return 0
    if _descents and func in _COMPARISONS and numbers[0] is None:
        # Norms and curvatures exceed tolerances, which are positive; a slope is below its negative one.
        numbers[0] = math.copysign(_MAGNITUDE, numbers[1])
    return None if None in numbers[:2] else combine(*numbers)


def _sum(values: KnownValues, tensor: Any) -> Number | None:
    """The sum of a tensor of one number, where it is exact."""
    number = values.number(tensor)
    if number is None:
        return None
    total = number * tensor.numel()
    is_exact = not tensor.is_floating_point() or (float(number).is_integer() and abs(total) <= _LARGEST_WHOLE)
    return total if is_exact else None


def _is_float(value: object) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else type(value) is float


def _if_finite(func: OpOverload, args: Sequence[object]) -> bool | None:
    """The answer to a question whether values are finite, for values that are; None for other questions."""
    if func in (_IS_NAN, _IS_INFINITE):
        return False
    if func in (_SAME, _OTHER):  # only NaN differs from itself
        return func is _SAME if args[0] is args[1] else None
    if func in _COMPARISONS and isinstance(args[1], float) and math.isinf(args[1]):
        return _COMPARISONS[func](0.0, args[1])
    return None


def _is_open_check(values: KnownValues, tensor: object) -> bool:
    """Whether it is of a check of finite values, and not known to have found another one."""
    return values.mark_of(tensor) is Mark.FINITE_CHECK and not values.number(tensor)


def _assumed(values: KnownValues, func: OpOverload, args: Sequence[Any]) -> tuple[Number | None, Diagnostic | None]:
    """The answer to a check or to a question of a generation, with its remark: values are finite, no token ends its
    sequence, all places of a beam search are filled."""
    number: Number | None = _if_finite(func, args)
    if number is None and func in (_OR, _LOGICAL_OR) and any(_is_open_check(values, arg) for arg in args):
        number = False  # what stands beside a check of finite values is one too
    if number is not None:
        return number, _FINITE
    if func is _IS_END_TOKEN and callers.called_to_stop_generation():
        return False, GOES_ON
    if func is _COUNT_FILLED_PLACES and args[0].dtype is torch.bool and callers.called_in_generation_loop():
        return int(math.prod(args[0].shape[dim] for dim in args[1])), GOES_ON
    return None, None


def _is_yes_beside_unknown(values: KnownValues, args: Sequence[object]) -> bool:
    """Whether one of two answers is yes and the other unknown, which then decides."""
    answers = [values.number(arg) if isinstance(arg, torch.Tensor) else arg for arg in args[:2]]
    return answers.count(None) == 1 and bool(answers[answers[0] is None])


def expected(tensor: torch.Tensor) -> tuple[Number, Diagnostic] | None:
    """The value for a loop of a library that goes on as long as it can, with its remark; None for other readers."""
    is_bool = tensor.dtype is torch.bool
    if callers.called_to_look_up_draft():
        return (False if is_bool else 0), ALLOWED  # or the token that it is asked of
    if is_bool:
        return (True, FITTED) if callers.called_to_fit_quantizer() else None
    if not callers.called_to_ask_confidence(tensor.is_floating_point()):
        return None
    return (1.0 if tensor.is_floating_point() else 0), CONFIDENT  # a probability, or the token that it is asked of


def goes_on(values: KnownValues, tensor: torch.Tensor) -> bool:
    """Whether a generation that reads this value is not over by its length, and goes on unless its tokens end it:
    transformers' beam search asks for ``improvement_possible & exists_open_beam & valid_continuations``, and the last
    one is known to be false at the largest length."""
    return values.mark_of(tensor) is Mark.GOES_ON and callers.called_in_generation_loop()


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
