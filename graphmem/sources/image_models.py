"""``timm:<name>`` and ``torchvision:<name>``: image classifiers built without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphmem.base.spellings import meant
from graphmem.errors import SourceError
from graphmem.sources.base import Built, Sizes, TorchModel, refuse_seq_len
from graphmem.sources.losses import CrossEntropy

if TYPE_CHECKING:
    from torch import nn

#: Side of the input images of torchvision's Inception v3; every other classifier there is trained on 224.
_INCEPTION_SIDE = 299
_SIDE = 224
_BROKEN = "does not import beside this PyTorch; install the version of torchvision that was made for it"


def load_timm(name: str) -> TorchModel:
    """A timm model by name. Raises :class:`SourceError` if timm is absent or does not know it."""
    try:
        import timm
    except Exception as error:
        if "torchvision" in str(error):
            raise SourceError(f"timm:{name}: timm needs torchvision, which {_BROKEN} ({error})") from None
        raise SourceError(f"timm:{name} needs timm; install it with: pip install 'graphmem[timm]' ({error})") from None
    if not timm.is_model(name):
        raise SourceError(f"timm has no model {name!r}{meant(name, timm.list_models())}")

    def build(sizes: Sizes) -> Built:
        refuse_seq_len(sizes, f"timm:{name}")
        model = timm.create_model(name, pretrained=False)
        channels, height, width = model.default_cfg["input_size"]
        return _classifier(model, sizes, (channels, height, width))

    return TorchModel(f"timm:{name}", build)


def load_torchvision(name: str) -> TorchModel:
    """A torchvision classifier by name. Raises :class:`SourceError` if torchvision is absent or does not know it."""
    try:
        from torchvision import models
    except Exception as error:
        raise SourceError(f"torchvision:{name} needs torchvision, which {_BROKEN} ({error})") from None
    known = models.list_models(module=models)
    if name not in known:
        raise SourceError(f"torchvision has no classifier {name!r}{meant(name, known)}")
    side = _INCEPTION_SIDE if "inception" in name else _SIDE

    def build(sizes: Sizes) -> Built:
        refuse_seq_len(sizes, f"torchvision:{name}")
        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        return _classifier(models.get_model(name, weights=None, **extra), sizes, (3, side, side))

    return TorchModel(f"torchvision:{name}", build)


def _classifier(model: nn.Module, sizes: Sizes, image: tuple[int, int, int]) -> Built:
    import torch

    batch = sizes.batch or 1
    images = torch.empty((batch, *image))
    notes = [f"images of {image[0]}x{image[1]}x{image[2]}"]
    if sizes.batch is None:
        notes.append("batch 1 (give --batch)")
    if not sizes.training:
        return Built(model, images, None, tuple(notes))
    labels = torch.zeros(batch, dtype=torch.long)
    notes.append("cross-entropy loss on class labels")
    return Built(model, images, CrossEntropy(labels), tuple(notes))
