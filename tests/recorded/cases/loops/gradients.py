"""What happens to gradients between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.recorded.cases.loops.networks import Transformer, convolutional, images, loss_of, mixed, tokens
from tests.recorded.cases.loops.registry import (
    FP16,
    ITERATIONS,
    Loop,
    adamw,
    add,
    case,
    group,
    made,
)

_O = torch.optim

group("gradients")


def zeroing(set_to_none: bool, first: bool, module: bool = False) -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    zero = model.zero_grad if module else optimizer.zero_grad
    for _ in range(ITERATIONS):
        if first:
            zero(set_to_none=set_to_none)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        if not first:
            zero(set_to_none=set_to_none)
    yield


for _none in (True, False):
    for _first in (True, False):
        add(
            f"zero_grad_{'none' if _none else 'zeros'}_{'first' if _first else 'last'}", partial(zeroing, _none, _first)
        )
add("zero_grad_of_module", partial(zeroing, False, True, True))


def accumulation(keep: bool, divide: bool = True) -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    kept: list[Tensor] = []
    for _ in range(ITERATIONS):
        for _ in range(3):
            output = model(x)
            loss = loss_of(output, y)
            (loss / 3 if divide else loss).backward()
            if keep:
                kept.append(output)
        optimizer.step()
        optimizer.zero_grad()
    yield


add("accumulation", partial(accumulation, False))
add("accumulation_keeping_outputs", partial(accumulation, True))
add("accumulation_summed", partial(accumulation, False, False))


def clipping(clip: Callable[[list[nn.Parameter]], Any], make_model: Callable[[], nn.Module] = Transformer) -> Loop:
    model = make_model().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    yield


_norm, _value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
add("clip_norm", partial(clipping, lambda p: _norm(p, 1.0)))
add("clip_norm_inf", partial(clipping, lambda p: _norm(p, 1.0, norm_type=float("inf"))))
add("clip_norm_one", partial(clipping, lambda p: _norm(p, 1.0, norm_type=1.0)))
add("clip_norm_foreach=0", partial(clipping, lambda p: _norm(p, 1.0, foreach=False)))
add("clip_norm_inf_foreach=0", partial(clipping, lambda p: _norm(p, 1.0, norm_type=float("inf"), foreach=False)))
add("clip_norm_error_if_nonfinite", partial(clipping, lambda p: _norm(p, 1.0, error_if_nonfinite=True)))
add("clip_norm_bf16", partial(clipping, lambda p: _norm(p, 1.0), lambda: Transformer().bfloat16()))
add("clip_norm_mixed_dtypes", partial(clipping, lambda p: _norm(p, 1.0), mixed))
add("clip_value", partial(clipping, lambda p: _value(p, 1.0)))
add("clip_value_foreach=0", partial(clipping, lambda p: _value(p, 1.0, foreach=False)))
add("total_norm_logged", partial(clipping, lambda p: nn.utils.get_total_norm([q.grad for q in p]).item()))


def scaled(clip: bool, make: Callable[[nn.Module], Any], batch: Any = tokens, build: Any = Transformer) -> Loop:
    model = build().cuda()
    x, y = batch()
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(ITERATIONS):
        with torch.autocast("cuda", FP16):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    yield


add("scaler", partial(scaled, False, adamw))
add("scaler_unscale_clip", partial(scaled, True, adamw))
add("scaler_fused", partial(scaled, False, partial(made, _O.AdamW, {"fused": True})))
add("scaler_fused_unscale_clip", partial(scaled, True, partial(made, _O.AdamW, {"fused": True})))
add("scaler_sgd", partial(scaled, True, partial(made, _O.SGD, {"momentum": 0.9})))
add("scaler_convolutional", partial(scaled, False, adamw, images, convolutional))


@case("retain_graph_twice")
def retain_graph_twice() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("two_losses_one_graph")
def two_losses_one_graph() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        logits = model(x)
        first, second = loss_of(logits, y), logits.float().square().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("gradient_penalty")
def gradient_penalty() -> Loop:
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 1)).cuda()
    x = torch.zeros(256, 32, device="cuda", requires_grad=True)
    optimizer = _O.Adam(model.parameters())
    for _ in range(ITERATIONS):
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = output.mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("gradient_penalty_convolutional")
def gradient_penalty_convolutional() -> Loop:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(32 * 64, 1),
    ).cuda()  # fmt: skip
    x = torch.zeros(4, 3, 32, 32, device="cuda", requires_grad=True)
    optimizer = _O.Adam(model.parameters())
    for _ in range(ITERATIONS):
        output = model(x)
        (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True, retain_graph=True)
        loss = output.mean() + 10 * ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("optimizer_in_backward")
def optimizer_in_backward() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizers = {p: _O.AdamW([p], foreach=False) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
    yield


@case("optimizer_in_backward_foreach")
def optimizer_in_backward_foreach() -> Loop:
    model = Transformer(tied=True).cuda()
    x, y = tokens()
    optimizers = {p: _O.AdamW([p]) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
    yield


@case("tensor_hooks")
def tensor_hooks() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    for _ in range(ITERATIONS):
        logits = model(x)
        logits.retain_grad()
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield
