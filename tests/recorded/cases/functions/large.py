"""Operators that other cases call with little: a buffer that is taken for many values alone would not show there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.recorded.cases.functions.registry import BOOL, I32, add, group, index, t

_aten = torch.ops.aten
_MANY = 1 << 22
_VALUES, _SQUARE = t(_MANY, grad=False), t(2048, 2048, grad=False)
_TENSORS, _EACH = 700, 5000


def _lists(function: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    """``function`` of several hundred tensors."""
    return lambda x: function(list(x.clone().view(_TENSORS, _EACH).unbind()))


group("large")
for _name, _function in {
    "arange": lambda: _aten.arange.start_step(0, _MANY, 1, device="cuda"),
    "linspace": lambda: torch.linspace(0, 1, _MANY, device="cuda"),
    "logspace": lambda: torch.logspace(0, 1, _MANY, device="cuda"),
    "ones": lambda: torch.ones(_MANY, device="cuda"),
    "rand": lambda: torch.rand(_MANY, device="cuda"),
    "rand_of_generator": lambda: _aten.rand.generator([_MANY], generator=None, device="cuda"),
    "randint": lambda: torch.randint(10, (_MANY,), device="cuda"),
    "randn": lambda: torch.randn(_MANY, device="cuda"),
}.items():
    add(f"large_{_name}", _function)
for _name, _function in {
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, x[:1024, :1024], (1024, 1024), (1024, 1)),
    "as_strided_": lambda x: x.clone().as_strided_((1024, 1024), (1, 1024)),
    "clamp_min_": lambda x: x.clone().clamp_min_(x),
    "add_out": lambda x: torch.add(x, x, alpha=0.5, out=x.clone()),
    "sub_out": lambda x: torch.sub(x, x, out=x.clone()),
    "hardswish_": lambda x: torch.nn.functional.hardswish(x.clone(), inplace=True),
    "bitwise_and_by_number": lambda x: x.long() & 7,
    "bitwise_or_by_number": lambda x: x.long() | 7,
    "bitwise_xor_by_number": lambda x: x.long() ^ 7,
    "stack_of_columns": lambda x: torch.stack([x[:, 0], x[:, 1], x.mT[0]], 1),
    "div_out": lambda x: torch.div(x, x[0, 0], out=x.clone()),
    "mul_out": lambda x: torch.mul(x, 0.5, out=x.clone()),
    "expand_copy": lambda x: torch.expand_copy(x[:, :1], (2048, 2048)),
    "index_fill_": lambda x: x.clone().index_fill_(0, torch.zeros(2048, dtype=torch.int64, device="cuda"), x[0, 0]),
    "scatter_": lambda x: x.clone().scatter_(0, torch.zeros(2048, 2048, dtype=torch.int64, device="cuda"), x),
    "linspace_of_tensors": lambda x: torch.linspace(x[0, 0], x[1, 1], _MANY, device="cuda"),
    "linspace_to_tensor": lambda x: torch.linspace(0, x[1, 1], _MANY, device="cuda"),
    "logspace_of_tensors": lambda x: torch.logspace(x[0, 0], x[1, 1], _MANY, device="cuda"),
    "logspace_to_tensor": lambda x: torch.logspace(0, x[1, 1], _MANY, device="cuda"),
}.items():
    add(f"large_{_name}", _function, _SQUARE)
for _name, _function in {
    "div": lambda many: torch._foreach_div(many, 2.0),
    "div_": lambda many: torch._foreach_div_(many, 2.0),
    "div_by_tensor_": lambda many: _aten._foreach_div_.Tensor(many, torch.ones((), device="cuda")),
    "lerp": lambda many: torch._foreach_lerp(many, many, 0.5),
    "lerp_by_number_": lambda many: torch._foreach_lerp_(many, many, 0.5),
    "lerp_": lambda many: torch._foreach_lerp_(many, many, [0.5] * _TENSORS),
    "maximum_": lambda many: torch._foreach_maximum_(many, 2.0),
    "mul": lambda many: torch._foreach_mul(many, 2.0),
    "neg_": torch._foreach_neg_,
    "pow_of_number": lambda many: torch._foreach_pow(2.0, many),
    "pow_": lambda many: torch._foreach_pow_(many, 2.0),
    "sub": lambda many: torch._foreach_sub(many, 2.0),
    "sub_list_": lambda many: torch._foreach_sub_(many, many),
    "sub_": lambda many: torch._foreach_sub_(many, 2.0),
}.items():
    add(f"large_foreach_{_name}", _lists(_function), t(_TENSORS * _EACH, grad=False))
for _name, _type in {"": torch.float32, "_cast": torch.bfloat16}.items():
    add(
        f"large_chunk_cat{_name}",
        lambda x, y, out: torch._chunk_cat([x, y], 0, 8, out=out),
        *(t(1001, 500, dtype=_type, grad=False), t(33, 7, dtype=_type, grad=False), t(8, 126 * 500 + 35, grad=False)),
    )
add("large_is_all_true", lambda x: _aten._is_all_true(x), t(1 << 24, dtype=BOOL))
add("large_logcumsumexp", lambda x: x.logcumsumexp(0), _VALUES)
add("large_logcumsumexp_columns", lambda x: x.logcumsumexp(0), _SQUARE)
add("large_nonzero_static", lambda x: torch.nonzero_static(x, size=1000), _VALUES)
add("large_nonzero_static_rows", lambda x: torch.nonzero_static(x, size=1000), _SQUARE)
for _name, _shape in {"one": (128, 128), "batch": (64, 128, 128), "tall": (3, 128, 70)}.items():
    _pivots = t(*_shape[:-2], min(_shape[-2:]), dtype=I32)
    add(f"large_lu_unpack_{_name}", torch.lu_unpack, t(*_shape, grad=False), _pivots)
for _name, _options in {"slices": {}, "consecutive": {"consecutive": True}}.items():
    _unique = torch.unique_consecutive if _options else torch.unique
    for _extra in ((), ("return_inverse",), ("return_counts",), ("return_inverse", "return_counts")):
        _asked = dict.fromkeys(_extra, True)
        _called = "_".join((_name, *(word.removeprefix("return_") for word in _extra)))
        add(f"large_unique_{_called}", lambda x, f=_unique, a=_asked: f(x, dim=1, **a), t(8, 100_000, grad=False))
        add(f"large_unique_{_called}_values", lambda x, f=_unique, a=_asked: f(x, **a), index(100_000))
