"""Gradient formulas that the predicted PyTorch has and the installed one has not.

A formula is C++ of the installed version, which calls operators. Where another version calls others, or keeps their
results for longer, the operator is given a gradient of its own here. As formulas run on a card: they write in place
(``areAnyTensorSubclassLike`` is false there), C++ destroys the temporaries of an expression at its end, from the last
one on, and evaluates arguments from right to left. The versions and their sources are in :mod:`graphmem.base.versions`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from graphmem.base import versions
from graphmem.capture.torch_internals import OpOverload
from graphmem.torch_names import private

_aten = torch.ops.aten
_LOST = "gradients that another version of PyTorch computes otherwise cannot be followed"
_below_autograd: Any = private("torch._C._AutoDispatchBelowAutograd", _LOST)
_node: Any = private("torch.autograd.function._SingleLevelFunction", _LOST)
_single_level: Any = private("torch._functorch.utils.enable_single_level_autograd_function", _LOST)
#: Which inputs want a gradient, the gradient of the output, and the inputs -> the inputs' gradients.
Gradients = tuple[Tensor | None, ...]
Formula = Callable[..., Gradients]


def _node_of(op: OpOverload, *methods: Any) -> Any:
    """A node of the graph with these methods, by the operator's name."""
    name = "".join(part.capitalize() for part in op._schema.name.removeprefix("aten::").split("_"))
    members = {method.__name__: staticmethod(method) for method in methods}
    return types.new_class(name, (_node,), exec_body=lambda namespace: namespace.update(members))


def with_gradient(op: OpOverload, formula: Formula) -> Callable[..., Any]:
    """The operator below autograd, with this formula as its node of the graph."""

    def forward(*inputs: object) -> Tensor:
        with _below_autograd():
            return op(*inputs)

    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: object) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: FunctionCtx, grad: Tensor) -> Gradients:
        return formula(ctx.needs_input_grad, grad, *ctx.saved_tensors)

    node = _node_of(op, forward, setup_context, backward)

    def run(*inputs: object) -> Tensor:
        wants = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if not wants:
            return forward(*inputs)
        with _single_level():  # torch.func has peeled its levels off: this is one of them
            return node.apply(*inputs)

    return run


# --- atan2 (``atan2_backward``, torch/csrc/autograd/FunctionsManual.cpp) ----------------------------------------------


def _atan2(keeps_squares: bool) -> Formula:
    """Since 2.10 the gradient is zero where both are: the sum of squares is kept to look at. One expression makes both
    gradients, and its temporaries go with its end."""

    def formula(wanted: Sequence[bool], grad: Tensor, self: Tensor, other: Tensor) -> Gradients:
        others, own = other * other, self * self
        squares = own + others
        if keeps_squares:
            del own, others
            inverse = squares.reciprocal()
            inverse.masked_fill_(squares == 0, 0)
        else:
            inverse = squares.reciprocal()
            del squares, own, others
        product = grad * other if wanted[0] else None
        of_self = product * inverse if product is not None else None
        negative = -self if wanted[1] else None
        turned = grad * negative if negative is not None else None
        of_other = turned * inverse if turned is not None else None
        return of_self, of_other

    return formula


_ATAN2_BEFORE = {_aten.atan2.default: _atan2(keeps_squares=False)}
_ATAN2 = {_aten.atan2.default: _atan2(keeps_squares=True)}


# --- the larger and the smaller of two, and limits (tools/autograd/derivatives.yaml, FunctionsManual.cpp) -------------


def _share(grad: Tensor, others: Tensor, equal: Callable[[], list[Tensor]]) -> Tensor:
    """Half of the gradient where the values are ``equal`` (the last of the masks that it makes), none where the
    ``others`` are taken, all of it elsewhere."""
    half = grad / 2
    masks = equal()
    shared = torch.where(masks[-1], half, grad)
    while masks:
        masks.pop()
    del half
    return shared.masked_fill_(others, 0)


#: Of the gradient and both values: the gradient of the one that ``loses`` where the last argument is true.
_Loses = Callable[[Tensor, Tensor], Tensor]
_Gradient = Callable[[Tensor, Tensor, Tensor, _Loses], Tensor]


def _of_each(of: _Gradient, self_loses: _Loses, other_loses: _Loses) -> Formula:
    """Of two values, each with a test of where it is not the one that was taken. The other's gradient comes first."""

    def formula(wanted: Sequence[bool], grad: Tensor, self: Tensor, other: Tensor) -> Gradients:
        of_other = of(grad, self, other, other_loses) if wanted[1] else None
        return (of(grad, self, other, self_loses) if wanted[0] else None), of_other

    return formula


def _shared(grad: Tensor, self: Tensor, other: Tensor, loses: _Loses) -> Tensor:
    return _share(grad, loses(self, other), lambda: [self == other])


def _without_nan(compare: Callable[..., Tensor], negated: bool) -> Callable[..., Tensor]:
    """The mask of where ``self`` is taken: ``compare`` holds or ``other`` is NaN; ``negated``, of where it is not."""

    def loses(self: Tensor, other: Tensor) -> Tensor:
        taken = compare(self, other).logical_or_(other.isnan())
        return taken.logical_not_() if negated else taken

    return loses


def _clamp(
    wanted: Sequence[bool], grad: Tensor, self: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Gradients:
    """``clamp_backward``: between two limits, which may be the wrong way round, masks say who is taken."""
    if low is None or high is None:
        return _one_limit(wanted, grad, self, low, high, _MAXIMUM, _MINIMUM)
    of_low = of_high = None
    if wanted[1] or wanted[2]:
        apart, together = low < high, low == high
        of_low = _of_low(grad, self, low, apart, together) if wanted[1] else None
        of_high = _of_high(grad, self, low, high, apart, together) if wanted[2] else None
        del apart, together
    return (_of_clamped(grad, self, low, high) if wanted[0] else None), of_low, of_high


def _one_limit(
    wanted: Sequence[bool], grad: Tensor, self: Tensor, low: Tensor | None, high: Tensor | None,
    above: Formula, below: Formula,
) -> Gradients:  # fmt: skip
    """``clamp`` with the lower or the upper limit alone."""
    if low is not None:
        return (*above((wanted[0], wanted[1]), grad, self, low), None)
    of_self, of_high = below((wanted[0], wanted[2]), grad, self, high)
    return of_self, None, of_high


def _of_low(grad: Tensor, self: Tensor, low: Tensor, apart: Tensor, together: Tensor) -> Tensor:
    below = self <= low
    first = apart.logical_and(below)
    under = self < low
    second = together.logical_and(under)
    taken = first.logical_or(second)
    del second, under, first, below
    return _share(grad, taken.logical_not(), lambda: [self == low])


def _of_high(grad: Tensor, self: Tensor, low: Tensor, high: Tensor, apart: Tensor, together: Tensor) -> Tensor:
    crossed = high < low
    above = self >= high
    first = apart.logical_and(above)
    either = crossed.logical_or(first)
    over = self > high
    second = together.logical_and(over)
    taken = either.logical_or(second)
    del second, over, either, first, above

    def equal() -> list[Tensor]:
        same = self == high
        return [same, same.logical_and(apart)]

    return _share(grad, taken.logical_not(), equal)


def _of_clamped(grad: Tensor, self: Tensor, low: Tensor, high: Tensor) -> Tensor:
    apart = low < high
    at_low, at_high = self == low, self == high
    either = at_low.logical_or(at_high)
    equal = either.logical_and(apart)
    del either, at_high, at_low
    outside = (self < low).logical_or(self > high)
    half = grad / 2
    shared = torch.where(equal, half, grad)
    del half
    shared.masked_fill_(outside, 0)
    del outside, equal, apart
    return shared


_MAXIMUM = _of_each(_shared, torch.lt, torch.gt)
_MINIMUM = _of_each(_shared, torch.gt, torch.lt)
_SHARED = {
    _aten.maximum.default: _MAXIMUM,
    _aten.minimum.default: _MINIMUM,
    _aten.fmax.default: _of_each(_shared, _without_nan(torch.ge, True), _without_nan(torch.gt, False)),
    _aten.fmin.default: _of_each(_shared, _without_nan(torch.le, True), _without_nan(torch.lt, False)),
    _aten.clamp_min.Tensor: _MAXIMUM,
    _aten.clamp_max.Tensor: _MINIMUM,
    _aten.clamp.Tensor: _clamp,
}


# --- the same before 2.15 ---------------------------------------------------------------------------------------------


def _halved(grad: Tensor, self: Tensor, other: Tensor, loses: _Loses) -> Tensor:
    """``maximum`` and ``minimum``: arguments from right to left, and the mask that is written last."""
    half = grad / 2
    same = self == other
    shared = torch.where(same, half, grad)
    others = loses(self, other)
    shared.masked_fill_(others, 0)
    del others, same, half
    return shared


def _filled(grad: Tensor, self: Tensor, other: Tensor, loses: _Loses) -> Tensor:
    """``fmax`` and ``fmin``."""
    return grad.masked_fill(loses(self, other), 0)


def _zero(grad: Tensor) -> Tensor:
    """A number of ``where`` is a tensor on the card."""
    return torch.scalar_tensor(0.0, dtype=grad.dtype, device=grad.device)


def _where(grad: Tensor, self: Tensor, other: Tensor, takes: _Loses) -> Tensor:
    """``clamp`` with one limit."""
    zero = _zero(grad)
    return torch.where(takes(self, other), grad, zero)


def _clamp_before(
    wanted: Sequence[bool], grad: Tensor, self: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Gradients:
    if low is None or high is None:
        return _one_limit(wanted, grad, self, low, high, _MIN_BEFORE, _MAX_BEFORE)
    of_low = of_high = None
    zero = _zero(grad) if wanted[1] or wanted[2] else None
    if wanted[1]:
        of_low = _where_both(grad, lambda: self < low, lambda: low < high, torch.Tensor.logical_and_, zero)
    if wanted[2]:
        of_high = _where_both(grad, lambda: self > high, lambda: high < low, torch.Tensor.logical_or_, zero)
    del zero
    if not wanted[0]:
        return None, of_low, of_high
    of_self = _where_both(grad, lambda: self >= low, lambda: self <= high, torch.Tensor.logical_and_, _zero(grad))
    return of_self, of_low, of_high


def _where_both(
    grad: Tensor, first: Callable[[], Tensor], second: Callable[[], Tensor], joined: _Loses, zero: Tensor
) -> Tensor:
    mask, other = first(), second()
    joined(mask, other)
    kept = torch.where(mask, grad, zero)
    del other, mask
    return kept


_MIN_BEFORE, _MAX_BEFORE = _of_each(_where, torch.ge, torch.lt), _of_each(_where, torch.le, torch.gt)
_ONE_TAKES_ALL = {
    _aten.maximum.default: _of_each(_halved, torch.lt, torch.gt),
    _aten.minimum.default: _of_each(_halved, torch.gt, torch.lt),
    _aten.fmax.default: _of_each(_filled, _without_nan(torch.ge, True), _without_nan(torch.ge, False)),
    _aten.fmin.default: _of_each(_filled, _without_nan(torch.le, True), _without_nan(torch.le, False)),
    _aten.clamp_min.Tensor: _MIN_BEFORE,
    _aten.clamp_max.Tensor: _MAX_BEFORE,
    _aten.clamp.Tensor: _clamp_before,
}
#: Changes of versions, with the formulas before and since.
FORMULAS = (
    (versions.ATAN2_OF_ZEROS, _ATAN2_BEFORE, _ATAN2),
    (versions.EQUAL_VALUES_SHARE_GRADIENTS, _ONE_TAKES_ALL, _SHARED),
)


# --- what formulas of the past keep (the nodes of torch/csrc/autograd/generated/Functions.h) --------------------------

#: The gradient of the first argument, of: the gradient, the first argument, the result and the other arguments.
_Past = Callable[..., Tensor]


def _mean(grad: Tensor, self: Tensor, _: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    dims = [one % self.dim() for one in (range(self.dim()) if dim is None or len(dim) == 0 else dim)]
    if not keepdim:
        for one in sorted(dims):
            grad = grad.unsqueeze(one)
    return grad.expand(self.shape) / math.prod(self.shape[one] for one in dims)


#: Operator; whether its result is kept, beside its input; the change that it is so since, None for always; the change
#: that ended it; the gradient.
PAST: tuple[tuple[OpOverload, bool, versions.Since | None, versions.Since, _Past], ...] = (
    (_aten._softmax.default, True, None, versions.SOFTMAX_KEEPS_RESULT_ALONE,
     lambda grad, self, result, dim, _: _aten._softmax_backward_data(grad, result, dim, self.dtype)),
    (_aten._log_softmax.default, True, None, versions.SOFTMAX_KEEPS_RESULT_ALONE,
     lambda grad, self, result, dim, _: _aten._log_softmax_backward_data(grad, result, dim, self.dtype)),
    (_aten.softplus.default, True, None, versions.SOFTMAX_KEEPS_RESULT_ALONE,
     lambda grad, self, _, beta=1, threshold=20: _aten.softplus_backward(grad, self, beta, threshold)),
    (_aten.relu.default, False, None, versions.RELU_KEEPS_RESULT,
     lambda grad, self, _: _aten.threshold_backward(grad, self, 0)),
    (_aten.mean.dim, False, versions.MEAN_OVER_DIMENSIONS_KEEPS_INPUT, versions.MEAN_KEEPS_SIZES, _mean),
    (_aten.mean.default, False, versions.MEAN_KEEPS_INPUT, versions.MEAN_KEEPS_SIZES, _mean),
)  # fmt: skip


def formulas_of_the_past(version: versions.Version) -> dict[OpOverload, Callable[..., Any]]:
    """Operators whose formula kept other tensors in this version than in any that can be installed."""
    return {
        op: _keeping(op, keeps_result, gradient)
        for op, keeps_result, since, ended, gradient in PAST
        if (since is None or since.holds(version)) and not ended.holds(version)
    }


def _keeping(op: OpOverload, keeps_result: bool, gradient: _Past) -> Callable[..., Any]:
    """The operator below autograd, whose node keeps its first argument and, if so, its result."""

    def forward(options: dict[str, Any], *inputs: object) -> Tensor:
        with _below_autograd():
            return op(*inputs, **options)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], *([output] if keeps_result else []))
        ctx.others = inputs[2:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        of_self = gradient(grad, kept[0], kept[-1], *ctx.others)
        return None, of_self, *(None for _ in ctx.others)

    node = _node_of(op, forward, setup_context, backward)

    def run(*inputs: Any, **options: object) -> Tensor:
        if not (torch.is_grad_enabled() and inputs[0].requires_grad):
            return forward(options, *inputs)
        with _single_level():
            return node.apply(options, *inputs)

    return run
