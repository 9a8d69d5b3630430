"""Lion as ``pip install lion-pytorch`` has it: one state of the parameter's type, and its temporaries.

The memory of lion-pytorch 0.2 (``lion_pytorch/lion_pytorch.py``); bitsandbytes' Lion is another (``lion32bit``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """Sign of an interpolated momentum, one tensor at a time. Raises :class:`ValueError` for a bad option."""

    def __init__(
        self,
        params: Iterable[object],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if not lr > 0 or len(betas) != 2 or not all(0 <= beta <= 1 for beta in betas):
            raise ValueError(f"lr is above 0 and betas are two numbers from 0 to 1, not {lr!r} and {betas!r}")
        del decoupled_weight_decay  # another factor, the same operators
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], object] | None = None) -> None:
        """One update of every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                    _update(parameter, parameter.grad, state["exp_avg"], group)


def _update(parameter: Tensor, gradient: Tensor, average: Tensor, group: dict[str, Any]) -> None:
    first, second = group["betas"]
    parameter.data.mul_(1 - group["lr"] * group["weight_decay"])
    direction = average.clone().mul_(first).add(gradient, alpha=1 - first).sgn_()
    parameter.add_(direction, alpha=-group["lr"])
    average.mul_(second).add_(gradient, alpha=1 - second)
