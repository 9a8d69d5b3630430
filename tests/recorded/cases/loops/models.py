"""Forms of models: tied and frozen parameters, copies, hooks, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.recorded.cases.loops.networks import Transformer, convolutional, images, loss_of, tokens
from tests.recorded.cases.loops.registry import (
    BF16,
    FP16,
    ITERATIONS,
    Loop,
    adamw,
    add,
    case,
    group,
    plain,
    train,
)

_O = torch.optim

group("models")

add("tied_weights", partial(plain, adamw, lambda: Transformer(tied=True)))
add("dropout", partial(plain, adamw, lambda: Transformer(dropout=0.1)))


def _frozen() -> nn.Module:
    model = Transformer()
    for part in (model.embedding, *model.blocks[:2]):
        part.requires_grad_(False)
    return model


add("frozen_backbone", partial(plain, adamw, _frozen))


@case("frozen_backbone_no_grad")
def frozen_backbone_no_grad() -> Loop:
    backbone, head = Transformer().cuda().eval(), nn.Linear(520, 10).cuda()
    x, _ = tokens()
    y = torch.zeros(x.shape[0], dtype=torch.int64, device="cuda")
    optimizer = _O.AdamW(head.parameters())
    for _ in range(ITERATIONS):
        with torch.no_grad():
            features = backbone(x).mean(1)
        loss = F.cross_entropy(head(features), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("frozen_filtered")
def frozen_filtered() -> Loop:
    yield from plain(lambda m: _O.Adam(filter(lambda p: p.requires_grad, m.parameters())), _frozen)


def averaged(make: Callable[[nn.Module], AveragedModel]) -> Loop:
    model = Transformer().cuda()
    average = make(model)
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    yield


add("averaged_model", partial(averaged, AveragedModel))
add("averaged_model_ema", partial(averaged, lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))))
add(
    "averaged_model_ema_function",
    partial(averaged, lambda m: AveragedModel(m, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)),
)
add("averaged_model_buffers", partial(averaged, lambda m: AveragedModel(m, use_buffers=True)))


def ema_copy(update: Callable[[nn.Module, nn.Module], None], build: Any = Transformer, batch: Any = tokens) -> Loop:
    model = build().cuda()
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    x, y = batch()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            update(ema, model)
    yield


def _lerp(ema: nn.Module, model: nn.Module) -> None:
    for kept, new in zip(ema.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 0.1)


def _mul_add(ema: nn.Module, model: nn.Module) -> None:
    for kept, new in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        if kept.is_floating_point():
            kept.mul_(0.9).add_(new, alpha=0.1)
        else:
            kept.copy_(new)


def _foreach_lerp(ema: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 0.1)


add("ema_lerp", partial(ema_copy, _lerp))
add("ema_foreach_lerp", partial(ema_copy, _foreach_lerp))
add("ema_mul_add", partial(ema_copy, _mul_add))
add("ema_convolutional", partial(ema_copy, _mul_add, convolutional, images))


@case("state_dict_saved")
def state_dict_saved() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    best = None
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    del state
    yield


@case("moved_to_cpu_and_back")
def moved_to_cpu_and_back() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    for _ in range(2):
        loss_of(model(x), y).backward()
        model.cpu()
        model.cuda()
    yield


def half(build: Callable[[], nn.Module], batch: Callable[[], Any], dtype: torch.dtype) -> Loop:
    model = build().cuda().to(dtype)
    x, y = batch()
    x = x.to(dtype) if x.is_floating_point() else x
    optimizer = _O.SGD(model.parameters(), lr=0.1)
    yield train(model, x, y, optimizer)


add("half_transformer", partial(half, Transformer, tokens, FP16))
add("half_convolutional", partial(half, convolutional, images, FP16))
add("bf16_convolutional", partial(half, convolutional, images, BF16))


@case("channels_last")
def channels_last() -> Loop:
    model = convolutional().cuda().to(memory_format=torch.channels_last)
    x, y = images()
    x = x.to(memory_format=torch.channels_last)
    optimizer = _O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield train(model, x, y, optimizer)


@case("channels_last_model_only")
def channels_last_model_only() -> Loop:
    build = lambda: convolutional().to(memory_format=torch.channels_last)  # noqa: E731
    yield from plain(adamw, build, images)


@case("module_hooks")
def module_hooks() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    features: dict[str, Any] = {}
    handles = [model.blocks[0].register_forward_hook(lambda m, i, o: features.update(first=o.detach()))]
    handles.append(model.blocks[1].register_forward_pre_hook(lambda m, i: (i[0] * 1.0,)))
    handles.append(model.blocks[2].register_forward_hook(lambda m, i, o: o + 1))
    handles.append(model.blocks[1].register_full_backward_hook(lambda m, gi, go: features.update(back=go[0])))
    yield train(model, x, y, optimizer)


@case("weight_norm")
def weight_norm() -> Loop:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(64, 128)), nn.ReLU(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(128, 10)),
        )  # fmt: skip

    yield from plain(
        adamw, build, lambda: (torch.zeros(32, 64, device="cuda"), torch.zeros(32, dtype=torch.int64, device="cuda"))
    )


def lora(base: torch.dtype) -> Loop:
    from peft import LoraConfig, get_peft_model

    model = Transformer().to(base)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["qkv", "out", "up", "down"])
    model = get_peft_model(model, config).cuda()
    x, y = tokens()
    optimizer = _O.AdamW([p for p in model.parameters() if p.requires_grad])
    yield train(model, x, y, optimizer)


add("lora", partial(lora, torch.float32))
add("lora_bf16_base", partial(lora, BF16))


@case("data_parallel", refused="DataParallel")
def data_parallel() -> Loop:
    model = nn.DataParallel(Transformer().cuda(), device_ids=[0, 1])
    x, y = tokens()
    loss_of(model(x), y).backward()
    yield


@case("data_parallel_one_card")
def data_parallel_one_card() -> Loop:
    yield from plain(adamw, lambda: nn.DataParallel(Transformer().cuda()))
