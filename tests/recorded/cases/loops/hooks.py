"""Hooks and attributes of parameters that are converted afterwards: moved to the card, or given another dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.recorded.cases.loops.networks import Transformer, loss_of, tokens
from tests.recorded.cases.loops.registry import BF16, ITERATIONS, Loop, add, case, group, train

_O = torch.optim

group("hooks")


def _descend_and_free(parameter: Tensor) -> None:
    """A gradient is used and gone before the next one is there."""
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def freeing(convert: Callable[[nn.Module], nn.Module], first: Callable[[nn.Module], nn.Module] | None = None) -> Loop:
    """The hooks are registered before ``convert``, and after ``first``."""
    model: nn.Module = Transformer()
    if first is not None:
        model = first(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_descend_and_free)
    model = convert(model)
    x, y = tokens()
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
    yield loss


add("freed_by_hooks_before_cuda", partial(freeing, lambda model: model.cuda()))
add("freed_by_hooks_before_a_second_to", partial(freeing, lambda m: m.to("cuda", BF16), lambda m: m.to("cuda")))
add("freed_by_hooks_before_bfloat16", partial(freeing, lambda model: model.bfloat16().cuda()))


@case("tags_read_after_cuda")
def tags() -> Loop:
    model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.trained = "norm" in name or "head" in name  # type: ignore[attr-defined]
    model.cuda()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.trained)  # type: ignore[attr-defined]
    x, y = tokens()
    yield train(model, x, y, _O.AdamW([p for p in model.parameters() if p.trained]))  # type: ignore[attr-defined]


@case("gradients_cast_by_hooks_before_cuda")
def cast() -> Loop:
    """Tensor hooks that give another gradient, of tied weights, and an optimizer made before the model is moved."""
    model = Transformer(tied=True)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1.0, 1.0) * 0.5)
    optimizer = _O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.cuda()
    x, y = tokens()
    yield train(model, x, y, optimizer)


@case("gradients_moved_with_their_parameters")
def moved() -> Loop:
    """A backward pass on the host; then everything moves, gradients too, and the hooks go on."""
    model = Transformer()
    x, y = (tensor.cpu() for tensor in tokens())
    loss_of(model(x), y).backward()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_descend_and_free)
    model.to("cuda", BF16)
    x, y = x.cuda(), y.cuda()
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
    yield loss
