"""Autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.recorded.cases.functions.common import MLP, TOKENS, X
from tests.recorded.cases.functions.registry import BF16, add, group, module, t

group("autograd")
module("mlp", MLP, TOKENS)
module("checkpoint", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=False))
module("checkpoint_reentrant", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=True))
module(
    "checkpoint_twice",
    MLP,
    TOKENS,
    run=lambda m, x: checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False),
)
module(
    "checkpoint_twice_reentrant",
    MLP,
    TOKENS,
    run=lambda m, x: checkpoint(m, checkpoint(m, x, use_reentrant=True), use_reentrant=True),
)
module(
    "checkpoint_dropout",
    lambda: nn.Sequential(nn.Linear(512, 2048), nn.Dropout(0.1), nn.Linear(2048, 512)),
    TOKENS,
    run=lambda m, x: checkpoint(m, x, use_reentrant=False),
)
module(
    "checkpoint_no_early_stop", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=False, early_stop=False)
)
module(
    "checkpoint_selective", MLP, TOKENS, run=lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=_selective)
)
module(
    "checkpoint_sequential",
    lambda: nn.Sequential(*(MLP() for _ in range(4))),
    TOKENS,
    run=lambda m, x: torch.utils.checkpoint.checkpoint_sequential(m, 2, x, use_reentrant=False),
)
module("save_on_cpu", MLP, TOKENS, run=lambda m, x: _save_on_cpu(m, x))
module("saved_tensor_hooks", MLP, TOKENS, run=lambda m, x: _packed(m, x))
module("forward_hook", MLP, TOKENS, run=lambda m, x: _hooked(m, x))
module("tensor_hook", MLP, TOKENS, run=lambda m, x: _tensor_hooked(m, x))
module("retain_graph", MLP, TOKENS, run=lambda m, x: _retained(m, x))
module("retain_grad", MLP, TOKENS, run=lambda m, x: _retain_grad(m, x))
module("double_backward", MLP, TOKENS, run=lambda m, x: _gradient_penalty(m, x))
module("grad_only_inputs", MLP, TOKENS, run=lambda m, x: torch.autograd.grad(m(x).sum(), x)[0])
module("fan_in", MLP, TOKENS, run=lambda m, x: m(x) + x + x * 2)
module("shared_weight", lambda: nn.Linear(512, 512), TOKENS, run=lambda m, x: m(m(x)))
module("detach", MLP, TOKENS, run=lambda m, x: m(x) * m(x).detach())
module("accumulate", MLP, TOKENS, run=lambda m, x: _accumulate(m, x))
module("jvp", MLP, TOKENS, run=lambda m, x: torch.func.vjp(m, x)[1](torch.ones_like(x))[0], grad=False)
add("custom_function", lambda x: _Square.apply(x), X)
add("custom_function_saved", lambda x: _Exponential.apply(x), X)
add("view_inplace", lambda x: _view_inplace(x), X)
module("weight_decay_loss", MLP, TOKENS, run=lambda m, x: m(x).mean() + sum(p.pow(2).sum() for p in m.parameters()))


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _save_on_cpu(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m(x)


def _packed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s.to(BF16), lambda s: s.to(torch.float32)):
        return m[0](x).relu()


def _hooked(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = m[1].register_forward_hook(lambda module, args, out: kept.append(out))
    out = m(x)
    handle.remove()
    return out + kept[0].mean()


def _tensor_hooked(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = m[0](x)
    hidden.register_hook(lambda g: g * 2)
    return m[2](m[1](hidden))


def _retained(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = m(x)
    out.sum().backward(retain_graph=True)
    return out


def _retain_grad(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = m[0](x)
    hidden.retain_grad()
    return m[2](m[1](hidden))


def _gradient_penalty(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = m(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + gradient.pow(2).mean()


def _accumulate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    m(x).mean().backward()
    return m(x).mean()


def _view_inplace(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, :100].mul_(3)
    return y.exp()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g * x


class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.extra = x * 2
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * y + ctx.extra


def _per_sample(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Gradients of every sample, as training with differential privacy takes them."""
    parameters = {name: parameter.detach() for name, parameter in m.named_parameters()}

    def loss(values: Any, one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(m, values, (one.unsqueeze(0),))
        return nn.functional.mse_loss(output.max(-1).values, target)

    return list(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y).values())


def _critic_penalty(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The penalty of a critic made of strided convolutions: second derivatives of convolutions."""
    (grad,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return grad.flatten(1).norm(dim=1).sub(1).square().mean()


module(
    "per_sample_gradients",
    lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)),
    t(24, 64),
    t(24, 1),
    run=_per_sample,
)
add("jacrev", lambda x: torch.func.jacrev(torch.tanh)(x), t(512), grad=False)
module(
    "critic_penalty",
    lambda: nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4)),
    t(6, 3, 16, 16),
    run=_critic_penalty,
)
module("double_backward_weights", MLP, TOKENS, run=lambda m, x: _meta_step(m, x))
module("hessian_vector_product", MLP, t(64, 512), run=lambda m, x: _hessian_vector(m, x))
module("moved_with_a_kept_graph", MLP, TOKENS, run=lambda m, x: _moved(m, x))
module("data_moved_with_a_kept_graph", MLP, TOKENS, run=lambda m, x: _data_moved(m, x))
module("converted_with_a_kept_graph", MLP, TOKENS, run=lambda m, x: _converted(m, x))


def _moved(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """To the host to be saved and back, with gradients, while the last loss is kept to be logged."""
    loss = m(x).mean()
    loss.backward()
    m.cpu().state_dict()
    m.cuda()
    return m(x) + loss.detach()


def _data_moved(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = m(x).mean()
    loss.backward()
    for parameter in m.parameters():
        home, parameter.data = parameter.data, parameter.data.cpu()
        parameter.grad.data = parameter.grad.data.cpu()
        del home
    for parameter in m.parameters():
        parameter.data, parameter.grad.data = parameter.data.cuda(), parameter.grad.data.cuda()
    return m(x) + loss.detach()


def _converted(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = m(x).mean()
    loss.backward()
    m.zero_grad()
    m.to(BF16)
    return m(x.to(BF16)) + loss.detach()


def _meta_step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One inner step of gradient descent that is differentiated again."""
    weights = dict(m.named_parameters())
    loss = torch.func.functional_call(m, weights, x).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(m, moved, x).mean()


def _hessian_vector(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parameters = list(m.parameters())
    gradients = torch.autograd.grad(m(x).pow(2).sum(), parameters, create_graph=True)
    return sum((g * g.detach()).sum() for g in gradients)


def _twice(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1).view(-1)
    y.mul_(2)
    y.add_(1)
    return y * 3


def _view_and_base(x: torch.Tensor) -> torch.Tensor:
    base = x * 1
    base.t().relu_()
    return base * 2


def _held(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The view's gradient goes to another tensor, too."""
    y = (x * 1).view(-1)
    y.relu_()
    return (y.view(x.shape) + x * 2,)


add("view_relu_", lambda x: (x * 1).view(-1).relu_() * 2, X)
add("view_relu_alone", lambda x: (x * 1).view(-1).relu_(), X)
add("transposed_mul_", lambda x: (x * 1).t().mul_(2) * 3, X)
add("permuted_silu_", lambda x: nn.functional.silu((x * 1)[None].permute(2, 0, 1), inplace=True) * 2, X)
add("unsqueezed_of_slice_relu_", lambda x: (x * 1)[:32].unsqueeze(1).relu_() * 2, X)
add("selected_relu_", lambda x: (x * 1)[3].relu_() * 2, X)
add("view_written_twice", _twice, X)
add("view_written_base_used", _view_and_base, X)
add("view_written_gradient_shared", _held, X)
module(
    "instance_norm_leaky_relu_",
    lambda: nn.Sequential(nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.01, inplace=True), nn.Conv2d(16, 4, 1)),
    t(2, 16, 32, 32),
)
