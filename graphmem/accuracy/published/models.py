"""Models of published cases, built from their libraries' code and public configurations: no weights, no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from graphmem.errors import SourceError

if TYPE_CHECKING:
    from graphmem.accuracy.published.case import ModelSpec


def factory_of(spec: ModelSpec, batch: int, *, training: bool) -> Callable[[], tuple[object, ...]]:
    """The factory that ``graphmem analyze`` takes. Raises :class:`SourceError` for a library that is not there."""
    makers = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}
    return makers[spec.library](spec, batch, training)


@cache
def configurations() -> Any:
    """The table of transformers models."""
    return json.loads(files("graphmem.accuracy.published").joinpath("models.json").read_text(encoding="utf-8"))


def _torchvision(spec: ModelSpec, batch: int, training: bool) -> Callable[[], tuple[object, ...]]:
    let_torchvision_load()
    try:
        from torchvision import models
    except Exception:  # absent, or made for another PyTorch
        raise SourceError("torchvision is not installed, or does not import beside this PyTorch") from None

    def build() -> tuple[Any, ...]:
        import torch

        images = torch.zeros(batch, 3, spec.side, spec.side)
        return _classified(models.get_model(spec.name, weights=None, num_classes=spec.classes), images, batch, training)

    return build


def _timm(spec: ModelSpec, batch: int, training: bool) -> Callable[[], tuple[object, ...]]:
    let_torchvision_load()
    try:
        import timm
    except Exception:
        raise SourceError("timm is not installed, or does not import beside this PyTorch") from None

    def build() -> tuple[Any, ...]:
        import torch

        model = timm.create_model(spec.name, pretrained=False)
        images = torch.zeros(batch, *model.default_cfg["input_size"])
        return _classified(model, images, batch, training)

    return build


def _transformers(spec: ModelSpec, batch: int, training: bool) -> Callable[[], tuple[Any, ...]]:
    let_torchvision_load()
    try:
        import transformers
    except Exception:
        raise SourceError("transformers is not installed") from None
    known = configurations()[spec.name]
    architecture = getattr(transformers, known["class"])

    def build() -> tuple[Any, ...]:
        import torch

        config = architecture.config_class(**known["config"])
        if "attention" in known:
            config._attn_implementation = known["attention"]
        ids = torch.zeros(batch, spec.length, dtype=torch.long)
        labels = ids if spec.labels == "tokens" else torch.zeros(batch, dtype=torch.long)
        return architecture(config), {"input_ids": ids, "labels": labels} if training else {"input_ids": ids}

    return build


def _classified(model: object, images: object, batch: int, training: bool) -> tuple[object, ...]:
    import torch

    from graphmem.sources.losses import CrossEntropy

    if not training:
        return model, images
    return model, images, CrossEntropy(torch.zeros(batch, dtype=torch.long))


def let_torchvision_load() -> None:
    """Where the zoo is installed, it knows how to load a torchvision that was made for another build of PyTorch."""
    from graphmem.sources.zoo import zoo_module

    try:
        libraries = zoo_module("libraries")
    except ImportError:
        return
    libraries.make_torchvision_importable()
