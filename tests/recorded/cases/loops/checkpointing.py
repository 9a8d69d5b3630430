"""Checkpointing and saved tensors on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.recorded.cases.loops.networks import Transformer, loss_of, tokens, transformers_model
from tests.recorded.cases.loops.registry import (
    BF16,
    ITERATIONS,
    Loop,
    adamw,
    add,
    case,
    group,
    plain,
)

_O = torch.optim

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

    yield from plain(adamw, lambda: Transformer(wrap=wrap))


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


add("transformers", partial(transformers_training, lambda model: None), true_values=True)
add("transformers_checkpointing", partial(transformers_training, _enable), true_values=True)
add(
    "transformers_checkpointing_reentrant",
    partial(transformers_training, partial(_enable, use_reentrant=True)),
    true_values=True,
)
add(
    "transformers_checkpointing_non_reentrant",
    partial(transformers_training, partial(_enable, use_reentrant=False)),
    true_values=True,
)


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
