"""Strides of results of tensors that lie in memory in different orders: later operators copy what they cannot view."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tests.functions.registry import add, group, t

group("layouts")

_X = t(4, 96, 1000)
_TURNED = t(4, 96, 1000, layout="transposed")
_GIVEN = t(4, 96, 1000, grad=False)
_TURNED_GIVEN = t(4, 96, 1000, grad=False, layout="transposed")

for _name, _function in {
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logit": lambda x: torch.logit(x, 1e-6),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_eval": F.rrelu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
}.items():
    add(f"{_name}_turned_gradient", lambda x, f=_function: f(x).mT.contiguous(), _X)
    add(f"{_name}_turned_input", lambda x, f=_function: f(x).flatten(1), _TURNED)

for _name, _loss in {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "l1": F.l1_loss,
}.items():
    add(f"{_name}_turned_input", _loss, _TURNED, _GIVEN)
    add(f"{_name}_none_turned_input", lambda x, y, f=_loss: f(x, y, reduction="none").flatten(1), _TURNED, _GIVEN)

for _name, _binary in {
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "special_xlog1py": torch.special.xlog1py,
}.items():
    add(f"{_name}_turned", lambda x, y, f=_binary: f(x, y).flatten(1), _TURNED, _GIVEN)
    add(f"{_name}_turned_other", lambda x, y, f=_binary: f(y, x).flatten(1), _TURNED, _GIVEN)
add("floor_divide_turned", lambda x, y: torch.floor_divide(x, y).flatten(1), _TURNED_GIVEN, _GIVEN)
add("floor_divide_turned_other", lambda x, y: torch.floor_divide(y, x).flatten(1), _TURNED_GIVEN, _GIVEN)
