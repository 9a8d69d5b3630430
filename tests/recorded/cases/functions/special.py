"""Special functions, elementwise."""

from __future__ import annotations

import torch

from tests.recorded.cases.functions.common import X
from tests.recorded.cases.functions.registry import add, group

group("special")
for name, function in {
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "erfinv": torch.erfinv,
    "erfc": torch.erfc,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sinc": torch.sinc,
    "i0": torch.i0,
    "logit": lambda x: torch.logit(x, 1e-6),
    "xlogy": lambda x: torch.xlogy(x, x),
    "entr": torch.special.entr,
    "log_ndtr": torch.special.log_ndtr,
    "sign": torch.sign,
    "frac": torch.frac,
    "round": torch.round,
    "fmod": lambda x: torch.fmod(x, 2.0),
    "remainder": lambda x: torch.remainder(x, x),
    "hypot": lambda x: torch.hypot(x, x),
    "copysign": lambda x: torch.copysign(x, x),
    "heaviside": lambda x: torch.heaviside(x.detach(), x.detach()),
    "deg2rad": torch.deg2rad,
    "logcosh": lambda x: torch.log(torch.cosh(x)),
    "square": torch.square,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "exp2": torch.exp2,
    "asinh": torch.asinh,
    "acos": torch.acos,
    "tan": torch.tan,
    "float_power": lambda x: torch.float_power(x, 2.0),
    "pow_tensor": lambda x: torch.pow(x, x),
    "pow_of_number": lambda x: torch.pow(2.0, x),
    "diff": torch.diff,
    "cumulative_trapezoid": torch.cumulative_trapezoid,
    "trapezoid": torch.trapezoid,
    "gradient": lambda x: torch.gradient(x)[0],
    "cov": lambda x: torch.cov(x),
    "corrcoef": lambda x: torch.corrcoef(x),
    "clamp_tensors": lambda x: torch.clamp(x, x - 1, x + 1),
    "where_number": lambda x: torch.where(x > 0, x, 0.1 * x),
    "isclose": lambda x: torch.isclose(x, x),
    "logical": lambda x: torch.logical_or(x > 0, x.isnan()),
}.items():
    add(name, function, X)
