"""Training loops whose allocations were recorded on the CUDA build, one by one.

A case is a generator function: it builds everything, runs its iterations, and yields once, at its end, with everything
it holds still alive. Nothing here knows who records: the same code runs on the CUDA build and in a capture.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.loops.models import Transformer, convolutional, images, loss_of, tokens

ITERATIONS = 3
BF16, FP16 = torch.bfloat16, torch.float16
Loop = Iterator[None]


@dataclass(frozen=True)
class Case:
    """One loop. ``refused``: what the message says where a capture cannot follow it, and says so."""

    name: str
    group: str
    run: Callable[[], Loop]
    refused: str = ""


CASES: dict[str, Case] = {}
_group = ""


def group(name: str) -> None:
    global _group
    _group = name


def add(name: str, run: Callable[[], Loop], refused: str = "") -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, _group, run, refused)


def case(name: str, refused: str = "") -> Callable[[Callable[[], Loop]], Callable[[], Loop]]:
    def register(run: Callable[[], Loop]) -> Callable[[], Loop]:
        add(name, run, refused)
        return run

    return register


@contextlib.contextmanager
def constant_values(truth: bool = False) -> Iterator[None]:
    """Values read back from the device are what a capture assumes of them, on a CUDA build too."""
    names = {"item": None, "__float__": float, "__bool__": bool, "__int__": int}
    with contextlib.ExitStack() as stack:
        for name, kind in names.items():
            read = getattr(torch.Tensor, name)
            stack.enter_context(mock.patch.object(torch.Tensor, name, _constant(read, kind, truth)))
        yield


def _constant(read: Callable[..., Any], kind: type | None, truth: bool) -> Callable[[Tensor], Any]:
    def constant(self: Tensor) -> Any:
        value = read(self)
        if not self.is_cuda:
            return value
        assumed = truth if self.dtype is torch.bool else 1.0 if self.is_floating_point() else 1
        return kind(assumed) if kind is not None else assumed

    return constant


def plain(
    make_optimizer: Callable[[nn.Module], Any],
    make_model: Callable[[], nn.Module] = Transformer,
    batch: Callable[[], tuple[Tensor, Tensor]] = tokens,
) -> Loop:
    """Forward, loss, backward, step, gradients dropped."""
    model = make_model().cuda()
    x, y = batch()
    optimizer = make_optimizer(model)
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        with constant_values() if isinstance(optimizer, torch.optim.ASGD) else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    yield


# --- optimizers -------------------------------------------------------------------------------------------------------

group("optimizers")

_O = torch.optim
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sgd": (_O.SGD, {"lr": 0.1}),
    "sgd_momentum": (_O.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_nesterov": (_O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd_maximize": (_O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "adam": (_O.Adam, {}),
    "adam_weight_decay": (_O.Adam, {"weight_decay": 0.1, "maximize": True}),
    "adamw": (_O.AdamW, {}),
    "adamw_amsgrad": (_O.AdamW, {"amsgrad": True}),
    "nadam": (_O.NAdam, {}),
    "nadam_decoupled": (_O.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (_O.RAdam, {}),
    "radam_weight_decay": (_O.RAdam, {"weight_decay": 0.1, "maximize": True}),
    "rmsprop": (_O.RMSprop, {}),
    "rmsprop_momentum": (_O.RMSprop, {"momentum": 0.9}),
    "rmsprop_centered": (_O.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "adagrad": (_O.Adagrad, {}),
    "adagrad_weight_decay": (_O.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (_O.Adadelta, {}),
    "adamax": (_O.Adamax, {}),
    "asgd": (_O.ASGD, {}),
    "rprop": (_O.Rprop, {}),
    "adafactor": (_O.Adafactor, {}),
}
_CAPTURABLE = ("adam", "adamw_amsgrad", "nadam", "radam", "rmsprop_centered", "adadelta", "adamax", "asgd", "rprop")
_FUSED = ("sgd", "sgd_momentum", "adam", "adamw", "adamw_amsgrad", "adagrad")
_TENSOR_LR = ("sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adamax", "adafactor")


def _made(kind: Callable[..., Any], options: dict[str, Any], model: nn.Module) -> Any:
    return kind(model.parameters(), **options)


for _name, (_kind, _options) in OPTIMIZERS.items():
    _variants: dict[str, dict[str, Any]] = {"": {}, "_foreach=0": {"foreach": False}}
    if _name in _FUSED:
        _variants["_fused"] = {"fused": True}
    if _name in _CAPTURABLE:
        _variants["_capturable"] = {"capturable": True}
        _variants["_capturable_foreach=0"] = {"capturable": True, "foreach": False}
    for _suffix, _extra in _variants.items():
        add(f"{_name}{_suffix}", partial(plain, partial(_made, _kind, _options | _extra)))
    if _name == "adafactor":
        add("adafactor_foreach=1", partial(plain, partial(_made, _kind, {"foreach": True})))


def tensor_lr(kind: Callable[..., Any], options: dict[str, Any], device: str) -> Loop:
    def make(model: nn.Module) -> Any:
        asks_if_valid = kind is not _O.SGD  # which asks whether it is not
        with constant_values(True) if asks_if_valid else contextlib.nullcontext():
            return kind(model.parameters(), **{**options, "lr": torch.tensor(0.1, device=device)})

    yield from plain(make)


for _name in _TENSOR_LR:
    _kind, _options = OPTIMIZERS[_name]
    add(f"{_name}_tensor_lr_cpu_foreach=0", partial(tensor_lr, _kind, {**_options, "foreach": False}, "cpu"))
for _name in ("adam", "adamw", "sgd"):
    _kind, _options = OPTIMIZERS[_name]
    add(f"{_name}_tensor_lr_fused", partial(tensor_lr, _kind, {**_options, "fused": True}, "cuda"))
add("adam_tensor_lr_capturable", partial(tensor_lr, _O.Adam, {"capturable": True}, "cuda"))
add(
    "adamw_tensor_lr_capturable_foreach=0", partial(tensor_lr, _O.AdamW, {"capturable": True, "foreach": False}, "cuda")
)


def _matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]


@case("muon")
def muon() -> Loop:
    yield from plain(lambda model: _O.Muon(_matrices_of(model), lr=0.02))


@case("muon_options")
def muon_options() -> Loop:
    def make(model: nn.Module) -> Any:
        return _O.Muon(_matrices_of(model), lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw")

    yield from plain(make)


def lbfgs(**options: Any) -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    with constant_values():
        for _ in range(ITERATIONS):
            optimizer.step(closure)
    yield


add("lbfgs", lbfgs)
add("lbfgs_strong_wolfe", partial(lbfgs, line_search_fn="strong_wolfe"))


@case("sparse_adam")
def sparse_adam() -> Loop:
    model = Transformer(sparse=True).cuda()
    x, y = tokens()
    sparse = _O.SparseAdam([model.embedding.weight])
    dense = _O.AdamW([p for name, p in model.named_parameters() if name != "embedding.weight"])
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    yield


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


for _suffix, _extra in {"": {}, "_fused": {"fused": True}, "_foreach=0": {"foreach": False}}.items():
    add(f"adamw_groups{_suffix}", partial(plain, lambda model, e=_extra: _O.AdamW(_groups(model), **e)))
    add(f"adamw_bf16{_suffix}", partial(plain, partial(_made, _O.AdamW, _extra), lambda: Transformer().bfloat16()))


def _mixed() -> nn.Module:
    model = Transformer()
    for block in model.blocks:
        block.up.bfloat16()
        block.down.bfloat16()
        block.norm_2.bfloat16()
    model.wrap = _mixed_block
    return model


def _mixed_block(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", BF16):
        return block(x).float()


for _name in ("adamw", "sgd_momentum", "nadam", "rmsprop_centered", "adagrad"):
    _kind, _options = OPTIMIZERS[_name]
    add(f"{_name}_mixed_dtypes", partial(plain, partial(_made, _kind, _options), _mixed))
add("adamw_convolutional", partial(plain, partial(_made, _O.AdamW, {}), convolutional, images))
add("sgd_convolutional", partial(plain, partial(_made, _O.SGD, {"momentum": 0.9}), convolutional, images))

# --- gradients --------------------------------------------------------------------------------------------------------

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
add("clip_norm_mixed_dtypes", partial(clipping, lambda p: _norm(p, 1.0), _mixed))
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


_adamw = partial(_made, _O.AdamW, {})
add("scaler", partial(scaled, False, _adamw))
add("scaler_unscale_clip", partial(scaled, True, _adamw))
add("scaler_fused", partial(scaled, False, partial(_made, _O.AdamW, {"fused": True})))
add("scaler_fused_unscale_clip", partial(scaled, True, partial(_made, _O.AdamW, {"fused": True})))
add("scaler_sgd", partial(scaled, True, partial(_made, _O.SGD, {"momentum": 0.9})))
add("scaler_convolutional", partial(scaled, False, _adamw, images, convolutional))


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


# --- models -----------------------------------------------------------------------------------------------------------

group("models")

add("tied_weights", partial(plain, _adamw, lambda: Transformer(tied=True)))
add("dropout", partial(plain, _adamw, lambda: Transformer(dropout=0.1)))


def _frozen() -> nn.Module:
    model = Transformer()
    for part in (model.embedding, *model.blocks[:2]):
        part.requires_grad_(False)
    return model


add("frozen_backbone", partial(plain, _adamw, _frozen))


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
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("half_transformer", partial(half, Transformer, tokens, FP16))
add("half_convolutional", partial(half, convolutional, images, FP16))
add("bf16_convolutional", partial(half, convolutional, images, BF16))


@case("channels_last")
def channels_last() -> Loop:
    model = convolutional().cuda().to(memory_format=torch.channels_last)
    x, y = images()
    x = x.to(memory_format=torch.channels_last)
    optimizer = _O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("channels_last_model_only")
def channels_last_model_only() -> Loop:
    build = lambda: convolutional().to(memory_format=torch.channels_last)  # noqa: E731
    yield from plain(_adamw, build, images)


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
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("weight_norm")
def weight_norm() -> Loop:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(64, 128)), nn.ReLU(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(128, 10)),
        )  # fmt: skip

    yield from plain(
        _adamw, build, lambda: (torch.zeros(32, 64, device="cuda"), torch.zeros(32, dtype=torch.int64, device="cuda"))
    )


def lora(base: torch.dtype) -> Loop:
    from peft import LoraConfig, get_peft_model

    model = Transformer().to(base)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["qkv", "out", "up", "down"])
    model = get_peft_model(model, config).cuda()
    x, y = tokens()
    optimizer = _O.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


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
    yield from plain(_adamw, lambda: nn.DataParallel(Transformer().cuda()))


# --- checkpointing ----------------------------------------------------------------------------------------------------

group("checkpointing")


def checkpointed(dropout: float = 0.0, autocast: bool = False, **options: Any) -> Loop:
    def wrap(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, **options)

    model = Transformer(dropout=dropout, wrap=wrap).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with torch.autocast("cuda", BF16, enabled=autocast):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("checkpoint", partial(checkpointed, use_reentrant=False))
add("checkpoint_reentrant", partial(checkpointed, use_reentrant=True))
add("checkpoint_dropout", partial(checkpointed, 0.1, use_reentrant=False))
add("checkpoint_reentrant_dropout", partial(checkpointed, 0.1, use_reentrant=True))
add("checkpoint_no_rng", partial(checkpointed, 0.1, use_reentrant=False, preserve_rng_state=False))
add("checkpoint_reentrant_no_rng", partial(checkpointed, 0.1, use_reentrant=True, preserve_rng_state=False))
add("checkpoint_autocast", partial(checkpointed, 0.1, True, use_reentrant=False))
add("checkpoint_reentrant_autocast", partial(checkpointed, 0.1, True, use_reentrant=True))
add("checkpoint_no_early_stop", partial(checkpointed, use_reentrant=False, early_stop=False))


def _must_save(operators: set[Any]) -> Callable[[], Any]:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


_aten = torch.ops.aten
_products = {_aten.mm.default, _aten.addmm.default, _aten._scaled_dot_product_efficient_attention.default}
add("checkpoint_selective", partial(checkpointed, use_reentrant=False, context_fn=_must_save(_products)))
add("checkpoint_selective_none", partial(checkpointed, use_reentrant=False, context_fn=_must_save(set())))


def nested(reentrant: bool) -> Loop:
    def wrap(block: nn.Module, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=reentrant) * 1.0

        return checkpoint(inner, x, use_reentrant=reentrant)

    yield from plain(_adamw, lambda: Transformer(wrap=wrap))


add("checkpoint_nested", partial(nested, False))
add("checkpoint_nested_reentrant", partial(nested, True))


@case("checkpoint_sequential")
def sequential() -> Loop:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))).cuda()
    x = torch.zeros(128, 64, device="cuda", requires_grad=True)
    optimizer = _O.AdamW(layers.parameters())
    for _ in range(ITERATIONS):
        loss = checkpoint_sequential(layers, 3, x, use_reentrant=False).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


def saved_on_cpu(pin: bool) -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("save_on_cpu", partial(saved_on_cpu, False))
add("save_on_cpu_pinned", partial(saved_on_cpu, True))


def transformers_model(**kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=520, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, **kwargs)


def transformers_training(enable: Callable[[Any], None]) -> Loop:
    model = transformers_model().cuda()
    enable(model)
    model.train()
    x, _ = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


def _enable(model: Any, **options: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


add("transformers", partial(transformers_training, lambda model: None))
add("transformers_checkpointing", partial(transformers_training, _enable))
add("transformers_checkpointing_reentrant", partial(transformers_training, partial(_enable, use_reentrant=True)))
add("transformers_checkpointing_non_reentrant", partial(transformers_training, partial(_enable, use_reentrant=False)))


@case("transformers_adafactor")
def transformers_adafactor() -> Loop:
    from transformers.optimization import Adafactor

    yield from plain(lambda model: Adafactor(model.parameters()))


@case("transformers_adafactor_momentum")
def transformers_adafactor_momentum() -> Loop:
    from transformers.optimization import Adafactor

    def make(model: nn.Module) -> Any:
        return Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9)

    yield from plain(make, lambda: Transformer().bfloat16())


# --- loops ------------------------------------------------------------------------------------------------------------

group("loops")


def evaluated(mode: Callable[[], Any], train_after: bool = True) -> Loop:
    model = Transformer(dropout=0.1).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        model.train()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with mode():
            output = model(x)
            accuracy = (output.argmax(-1) == y).float().mean().item()
            total = loss_of(output, y)
    del accuracy, total
    yield


add("evaluation_no_grad", partial(evaluated, torch.no_grad))
add("evaluation_inference_mode", partial(evaluated, torch.inference_mode))


def losses(keep: Callable[[Tensor], Any]) -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    history = []
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(keep(loss))
    yield


add("loss_kept", partial(losses, lambda loss: loss))
add("loss_item", partial(losses, lambda loss: loss.item()))
add("loss_detached", partial(losses, lambda loss: loss.detach()))
add("loss_to_cpu", partial(losses, lambda loss: loss.detach().cpu()))


@case("loss_kept_without_backward")
def loss_kept_without_backward() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    total: Any = 0.0
    for _ in range(ITERATIONS):
        total += loss_of(model(x), y)
    total.backward()
    yield


@case("running_loss")
def running_loss() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    running: Any = 0.0
    for _ in range(ITERATIONS):
        output = model(x)
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += loss.detach()
    yield


@case("output_kept_until_next")
def output_kept_until_next() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("empty_cache")
def empty_cache() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        torch.cuda.empty_cache()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    yield


def loader(pin: bool) -> Loop:
    model = Transformer().cuda()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        x, y = tokens("cpu")
        if pin:
            x, y = x.pin_memory(), y.pin_memory()
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("loader", partial(loader, False))
add("loader_pinned", partial(loader, True))


@case("real_data_loader")
def real_data_loader() -> Loop:
    x, y = images("cpu")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    model = convolutional().cuda()
    optimizer = _O.AdamW(model.parameters())
    for inputs, targets in data:
        inputs, targets = inputs.cuda(), targets.cuda()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


def autocast(context: Callable[[], Any], inner: Callable[[], Any] | None = None, whole: bool = False) -> Loop:
    def wrap(block: nn.Module, x: Tensor) -> Tensor:
        with inner():
            return block(x.float())

    model = Transformer(wrap=wrap if inner is not None else None).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with context():
            loss = loss_of(model(x), y)
            if whole:
                loss.backward()
        if not whole:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


_amp = partial(torch.autocast, "cuda", BF16)
add("autocast", partial(autocast, _amp))
add("autocast_backward_inside", partial(autocast, _amp, None, True))
add("autocast_nested", partial(autocast, _amp, partial(torch.autocast, "cuda", FP16)))
add("autocast_disabled_region", partial(autocast, _amp, partial(torch.autocast, "cuda", enabled=False)))
add("autocast_no_cache", partial(autocast, partial(_amp, cache_enabled=False)))
add("autocast_decorator_default", partial(autocast, partial(torch.autocast, "cuda")))
add("autocast_inner_only", partial(autocast, contextlib.nullcontext, _amp))


@case("autocast_accumulation")
def autocast_accumulation() -> Loop:
    model = Transformer(tied=True).cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with _amp():
            for _ in range(2):
                loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("autocast_evaluation")
def autocast_evaluation() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with _amp():
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), _amp():
            output = model(x)
        with torch.inference_mode(), _amp():
            output = model(x)
    del output
    yield


@case("default_device")
def default_device() -> Loop:
    torch.set_default_device("cuda")
    try:
        model = Transformer()
        x, y = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int64)
        optimizer = _O.AdamW(model.parameters())
        for _ in range(ITERATIONS):
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_device(None)
    yield


@case("built_on_device")
def built_on_device() -> Loop:
    with torch.device("cuda"):
        model = Transformer(dropout=0.1)
        net = convolutional()
        x, y = torch.zeros(4, 64, dtype=torch.int64), torch.randint(520, (4, 64))
    optimizer = _O.AdamW([*model.parameters(), *net.parameters()])
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("scheduler")
def scheduler() -> Loop:
    model = Transformer().cuda()
    x, y = tokens()
    optimizer = _O.AdamW(model.parameters())
    warm = _O.lr_scheduler.LinearLR(optimizer, total_iters=2)
    cosine = _O.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        warm.step()
        cosine.step()
        optimizer.zero_grad()
    yield


@case("adversarial")
def adversarial() -> Loop:
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 48)).cuda()
    discriminator = nn.Sequential(nn.Linear(48, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).cuda()
    for_generator = _O.Adam(generator.parameters())
    for_discriminator = _O.Adam(discriminator.parameters())
    real = torch.zeros(32, 48, device="cuda")
    ones, zeros = torch.ones(32, 1, device="cuda"), torch.zeros(32, 1, device="cuda")
    for _ in range(ITERATIONS):
        fake = generator(torch.randn(32, 16, device="cuda"))
        for_discriminator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        loss.backward()
        for_discriminator.step()
        for_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        loss.backward()
        for_generator.step()
    yield


@case("distillation")
def distillation() -> Loop:
    teacher, student = Transformer().cuda().eval(), Transformer(dropout=0.1).cuda()
    x, _ = tokens()
    optimizer = _O.AdamW(student.parameters())
    for _ in range(ITERATIONS):
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, -1)
        loss = F.kl_div(F.log_softmax(student(x) / 2, -1), wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("greedy_generation")
def greedy_generation() -> Loop:
    model = transformers_model(dtype=BF16).cuda().eval()
    current, past = torch.zeros(2, 16, dtype=torch.int64, device="cuda"), None
    generated = [current]
    with torch.no_grad():
        for _ in range(6):
            output = model(input_ids=current, past_key_values=past, use_cache=True)
            past = output.past_key_values
            current = output.logits[:, -1:].argmax(-1)
            generated.append(current)
    result = torch.cat(generated, 1)
    del result
    yield


@case("generate", refused="generate")
def generate() -> Loop:
    model = transformers_model().cuda().eval()
    prompt = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
    model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    yield
