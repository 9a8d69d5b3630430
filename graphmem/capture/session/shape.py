"""Builds a model as a capture does, and counts the parameters of it and of its blocks without running a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from graphmem.base.textbook import ModelShape
from graphmem.capture.distributed.sharded_model import NAMES, configurations, first, unsplit_blocks
from graphmem.capture.session.session import Session, capture
from graphmem.devices import Device
from graphmem.errors import SourceError

#: Of configurations of transformers, beside those of :data:`sharded_model.NAMES`.
_MORE_NAMES = {
    "key_value_heads": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_of_token": ("num_experts_per_tok", "num_experts_per_token"),
    "vocabulary": ("vocab_size",),
}


def model_shape(
    build: Callable[[Any], Any], sizes: object, *, name: str, device: Device, torch_version: tuple[int, int]
) -> ModelShape:
    """The shape of the model that ``build`` builds. Raises :class:`SourceError` for a step that runs itself, and
    :class:`CaptureError`."""
    found: list[ModelShape] = []

    def look(_: Session) -> None:
        built = build(sizes)
        if built is None:
            raise SourceError(f"{name} runs its whole step itself; let it return (model, inputs) to have it laid out")
        found.append(_shape(built.model, name))

    capture(look, source=name, device=device, torch_version=torch_version)
    return found[0]


def _shape(model: nn.Module, name: str) -> ModelShape:
    blocks = unsplit_blocks(model)
    config = next(configurations(model), None)
    names = {**NAMES, **_MORE_NAMES}
    found_sizes = {key: _whole(config, spellings) for key, spellings in names.items()}
    plans = [kind for kind in ("tp", "ep", "pp") if getattr(model, f"{kind}_plan", None)]
    return ModelShape(
        name=name,
        parameters=_elements(model.parameters()),
        trainable=_elements(parameter for parameter in model.parameters() if parameter.requires_grad),
        units=tuple(_elements(block.parameters()) for block in blocks),
        unit_names=tuple(sorted({type(block).__name__ for block in blocks})),
        saved=tuple(_saved(block) for block in blocks),
        hidden=found_sizes["hidden"],
        heads=found_sizes["heads"],
        key_value_heads=found_sizes["key_value_heads"] or found_sizes["heads"],
        experts=found_sizes["experts"],
        experts_of_token=found_sizes["experts_of_token"],
        predicts=found_sizes["vocabulary"] if _predicts_tokens(type(model)) else 0,
        plans=tuple(plans),
    )


def _predicts_tokens(kind: type[nn.Module]) -> bool:
    """Whether this class of transformers has the loss of the next token; ``GPT2LMHeadModel`` has an older name."""
    asks = getattr(inspect.unwrap(kind.forward), "__code__", None)
    older = kind.__name__.endswith("LMHeadModel") and asks is not None and "loss_function" in asks.co_names
    return kind.__name__.endswith("ForCausalLM") or older


def _elements(parameters: Iterator[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _saved(block: nn.Module) -> int:
    """Linear layers of different widths have different inputs, and keep them for the gradient of their weight."""
    widths = {
        module.in_features
        for module in block.modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    return sum(widths)


def _whole(config: object, spellings: Sequence[str]) -> int:
    value = None if config is None else first(config, spellings)
    return value if type(value) is int and value > 0 else 0
