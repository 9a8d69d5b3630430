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


def _observer(x: torch.Tensor, channels: int) -> torch.Tensor:
    """A fused observer that only observes, of the whole tensor or of every channel, called twice."""
    device = x.device
    count = 0 if channels > 1 else 1
    kept = [torch.ones(count, device=device) for _ in range(2)]
    scale, zero = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    on, off = (make(1, dtype=torch.int64, device=device) for make in (torch.ones, torch.zeros))
    for _ in range(2):
        out = torch.fused_moving_avg_obs_fake_quant(
            x, on, off, *kept, scale, zero, 0.01, -128, 127, 0, channels > 1, channels > 1
        )
    return out


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    scale = torch.ones(len(x), device=x.device)
    zero = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -128, 127)


add("fake_quantized", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), X)
add("fake_quantized_by_channel", _by_channel, X)
add("fused_observer", lambda x: _observer(x, 1), X)
add("fused_observer_by_channel", lambda x: _observer(x, len(x)), X)
