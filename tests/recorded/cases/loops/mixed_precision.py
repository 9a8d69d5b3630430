"""Autocast where weights are cast without gradients: in evaluation, by teachers, in functions of the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.recorded.cases.loops.networks import Transformer, loss_of, tokens
from tests.recorded.cases.loops.registry import BF16, ITERATIONS, Loop, add, case, group

_O = torch.optim
_amp = partial(torch.autocast, "cuda", BF16)

group("mixed_precision")


def _wide() -> nn.Module:
    """Its weights are larger than everything that it computes, so a cast that is kept shows in the peak."""
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256))


def served(*contexts: Callable[[], Any]) -> Loop:
    """A model looks at some batches, in contexts that are entered in this order."""
    model = _wide().cuda()
    x = torch.zeros(8, 256, device="cuda")
    for _ in range(ITERATIONS):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            outputs = [model(x) for _ in range(3)]
    yield outputs


add("autocast_in_inference_mode", partial(served, torch.inference_mode, _amp))
add("inference_mode_in_autocast", partial(served, _amp, torch.inference_mode))
add("autocast_in_no_grad", partial(served, torch.no_grad, _amp))
add("no_grad_in_autocast", partial(served, _amp, torch.no_grad))
add("grad_in_inference_mode", partial(served, torch.inference_mode, torch.enable_grad, _amp))


def seen_before(mode: Callable[[], Any], model: Callable[[], nn.Module] = Transformer) -> Loop:
    """Within one autocast context the weights are first used without gradients, as for pseudo labels, then trained."""
    network = model().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(network.parameters())
    for _ in range(ITERATIONS):
        with _amp():
            with mode():
                guess = network(x).argmax(-1)
            loss = loss_of(network(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield guess


add("no_grad_before_training", partial(seen_before, torch.no_grad))
add("inference_mode_before_training", partial(seen_before, torch.inference_mode))
add("no_grad_before_training_tied", partial(seen_before, torch.no_grad, partial(Transformer, tied=True)))


@case("momentum_teacher_in_autocast")
def momentum_teacher_in_autocast() -> Loop:
    """The teacher's weights require gradients that nobody takes: their casts are kept with the student's."""
    student, teacher = Transformer().cuda(), Transformer().cuda()
    x, _ = tokens()
    optimizer = _O.AdamW(student.parameters())
    for _ in range(ITERATIONS):
        with _amp():
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            loss = F.cross_entropy(student(x).flatten(0, 1), wanted.flatten(0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.lerp_(new, 0.01)
    yield


class _Rescaled(torch.autograd.Function):
    """A product of the user's own: autograd is off while ``forward`` runs, and casts happen in it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = F.linear(x, weight)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


@case("own_function_in_autocast")
def own_function_in_autocast() -> Loop:
    first, weight = nn.Linear(64, 256).cuda(), nn.Parameter(torch.zeros(256, 256, device="cuda"))
    optimizer = _O.AdamW([*first.parameters(), weight])
    x = torch.zeros(32, 4, 64, device="cuda")
    for _ in range(ITERATIONS):
        with _amp():
            hidden = F.relu(_Rescaled.apply(first(x), weight))
            loss = F.linear(hidden, weight).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield
