"""Strides of results of tensors that lie in memory in different orders: later operators copy what they cannot view."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.registry import add, group, t

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

# Windows of tokens: strides that suggest channels_last, with gaps.
_TOKENS = t(2, 14, 14, 192)
_VOLUME = t(2, 32, 8, 14, 14)
_VOLUME_LAST = t(2, 32, 8, 14, 14, layout="channels_last")

for _name, _pool in {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 7),
    "interpolate_bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}.items():
    add(f"{_name}_of_tokens", lambda x, f=_pool: f(x[..., :96].permute(0, 3, 1, 2)).permute(0, 2, 3, 1), _TOKENS)
    add(f"{_name}_of_tokens_planar", lambda x, f=_pool: f(x[..., :96].permute(0, 3, 1, 2)).flatten(1), _TOKENS)

for _name, _pool in {"max_pool3d": F.max_pool3d, "avg_pool3d": F.avg_pool3d}.items():
    add(f"{_name}_of_volume_last", lambda x, f=_pool: f(x, 2), _VOLUME_LAST)
    add(f"{_name}_of_volume_last_planar", lambda x, f=_pool: f(x, 2).flatten(1), _VOLUME_LAST)
    add(f"{_name}_of_turned", lambda x, f=_pool: f(x.mT, 2).flatten(1), _VOLUME)
    add(f"{_name}_of_slices", lambda x, f=_pool: f(x[:, ::2], 2), _VOLUME)
    add(f"{_name}_of_turned_gradient", lambda x, f=_pool: f(x, 2).mT.contiguous(), _VOLUME)


def _unscaled(*gradients: torch.Tensor) -> torch.Tensor:
    """As a gradient scaler does it, where weights and their gradients are channels_last."""
    found, inverse = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_([one.detach() for one in gradients], found, inverse)
    return found


add("amp_unscaled_channels_last", _unscaled, *(t(16 * n, 16, 3, 3, layout="channels_last") for n in (1, 2, 3)))
add(
    "foreach_abs_in_place",
    lambda *many: torch._foreach_abs_([one.detach() for one in many]),
    *(t(16 * n, 16, 3, 3, layout="channels_last") for n in (1, 2, 3)),
)
