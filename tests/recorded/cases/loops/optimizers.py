"""Optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.recorded.cases.loops.networks import Transformer, convolutional, images, loss_of, mixed, tokens
from tests.recorded.cases.loops.registry import (
    ITERATIONS,
    Loop,
    add,
    case,
    constant_values,
    descending_values,
    group,
    is_captured,
    made,
    plain,
)

_O = torch.optim

group("optimizers")

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


for _name, (_kind, _options) in OPTIMIZERS.items():
    _variants: dict[str, dict[str, Any]] = {"": {}, "_foreach=0": {"foreach": False}}
    if _name in _FUSED:
        _variants["_fused"] = {"fused": True}
    if _name in _CAPTURABLE:
        _variants["_capturable"] = {"capturable": True}
        _variants["_capturable_foreach=0"] = {"capturable": True, "foreach": False}
    for _suffix, _extra in _variants.items():
        add(f"{_name}{_suffix}", partial(plain, partial(made, _kind, _options | _extra)))
    if _name == "adafactor":
        add("adafactor_foreach=1", partial(plain, partial(made, _kind, {"foreach": True})))


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

    with contextlib.nullcontext() if is_captured(model) else descending_values():
        for _ in range(ITERATIONS):
            optimizer.step(closure)
    yield


add("lbfgs", lbfgs)
add("lbfgs_strong_wolfe", partial(lbfgs, line_search_fn="strong_wolfe"))


@case("sparse_adam", selects_nothing=True)
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


def sparse(passes: int, forward: Callable[[Any, Tensor], Tensor] | None = None) -> Loop:
    """Sparse gradients of an embedding that are added up."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(520, 96, sparse=True)
            self.head = nn.Linear(96, 520)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(forward(self.embedding, x) if forward else self.embedding(x))

    model = Model().cuda()
    x, y = tokens()
    optimizer = _O.SparseAdam([model.embedding.weight])
    for _ in range(ITERATIONS):
        for _ in range(passes):
            loss = loss_of(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("sparse_gradients_accumulated", partial(sparse, 2), selects_nothing=True)
add("sparse_gradients_fan_in", partial(sparse, 1, lambda e, x: e(x) + e(x + 1)), selects_nothing=True)


def coalesced(make: Callable[..., Any], **options: Any) -> Loop:
    """Gradients that are said to have distinct indices already, so that optimizers find rows to step."""
    table = nn.Parameter(torch.zeros(1000, 64, device="cuda"))
    optimizer = make([table], lr=0.1, **options)
    for _ in range(ITERATIONS):
        indices, values = torch.zeros(1, 96, dtype=torch.int64, device="cuda"), torch.zeros(96, 64, device="cuda")
        table.grad = torch.sparse_coo_tensor(indices, values, (1000, 64))._coalesced_(True)
        del indices, values
        optimizer.step()
        optimizer.zero_grad()
    yield


add("sparse_adam_coalesced", partial(coalesced, _O.SparseAdam))
add("sparse_adagrad_coalesced", partial(coalesced, _O.Adagrad))
add("sparse_sgd_coalesced", partial(coalesced, _O.SGD))
add("sparse_sgd_momentum_coalesced", partial(coalesced, _O.SGD, momentum=0.9))


def sparse_only(make: Callable[..., Any], bag: bool = False, **options: Any) -> Loop:
    """Nothing but an embedding, whose gradients have equal indices."""
    kind = partial(nn.EmbeddingBag, mode="sum") if bag else nn.Embedding
    model = kind(1000, 64, sparse=True, device="cuda")
    optimizer = make(model.parameters(), lr=0.1, **options)
    tokens = torch.zeros(8, 12, dtype=torch.int64, device="cuda")
    for _ in range(ITERATIONS):
        (model(tokens) * 2.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


add("sparse_sgd", partial(sparse_only, _O.SGD))
add("sparse_sgd_momentum", partial(sparse_only, _O.SGD, momentum=0.9), selects_nothing=True)
add("sparse_adagrad", partial(sparse_only, _O.Adagrad), selects_nothing=True)
add("sparse_bag", partial(sparse_only, _O.SGD, bag=True))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


for _suffix, _extra in {"": {}, "_fused": {"fused": True}, "_foreach=0": {"foreach": False}}.items():
    add(f"adamw_groups{_suffix}", partial(plain, lambda model, e=_extra: _O.AdamW(_groups(model), **e)))
    add(f"adamw_bf16{_suffix}", partial(plain, partial(made, _O.AdamW, _extra), lambda: Transformer().bfloat16()))


for _name in ("adamw", "sgd_momentum", "nadam", "rmsprop_centered", "adagrad"):
    _kind, _options = OPTIMIZERS[_name]
    add(f"{_name}_mixed_dtypes", partial(plain, partial(made, _kind, _options), mixed))
add("adamw_convolutional", partial(plain, partial(made, _O.AdamW, {}), convolutional, images))
add("sgd_convolutional", partial(plain, partial(made, _O.SGD, {"momentum": 0.9}), convolutional, images))
