"""A manifest's entry turned into a model with the inputs and the loss of one step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .libraries import make_torchvision_importable, recipe
from .manifest import Entry
from .recipe import Recipe
from .tasks import BatchSizes, inputs_of, loss_of

#: Where the manifest says nothing: pixels of a square image, and tokens.
DEFAULT_SIDE, DEFAULT_LENGTH = 224, 128


@dataclass(frozen=True)
class Step:
    """A model, the inputs of one step (a tensor, a tuple or keyword arguments), and a loss on its output or None."""

    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Any] | None


def build(entry: Entry, batch: int | None = None, length: int | None = None, *, training: bool = True) -> Step:
    """The entry's step, with its own sizes where none are given.

    Raises ``ImportError`` when the entry's library is not installed, ``ValueError`` for a length where it has none.
    """
    if length is not None and entry.length is None:
        raise ValueError(f"{entry.name} has no sequence length")
    if entry.task is None:
        return Step(*_recipe(entry)(batch or entry.batch))
    model = _transformers_model(entry)
    sizes = BatchSizes(
        batch=batch or entry.batch,
        length=length or entry.length or DEFAULT_LENGTH,
        side=entry.side or DEFAULT_SIDE,
        training=training,
    )
    return Step(model, inputs_of(entry.task, model, sizes), loss_of(entry.task, sizes) if training else None)


def _recipe(entry: Entry) -> Recipe:
    if entry.library == "timm":
        return recipe(entry.model)
    module, _, name = entry.model.partition(":")
    found: Recipe = getattr(importlib.import_module(module, __package__), name)
    return found


def _transformers_model(entry: Entry) -> nn.Module:
    make_torchvision_importable()  # transformers imports it where it is installed
    import transformers

    architecture = getattr(transformers, entry.model.partition(":")[2])
    model: nn.Module = architecture(architecture.config_class(**entry.config))
    return model
