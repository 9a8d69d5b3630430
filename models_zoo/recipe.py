"""What every model of the zoo is: how to build it, what a batch is, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Device = torch.device | str | None
#: (inputs, targets) of a batch on a device. Inputs are a tensor or a tuple of them, for a model of several arguments;
#: targets are None where the model makes its own loss.
Batch = tuple[Any, Tensor | None]


@dataclass(frozen=True)
class Recipe:
    """A model by its three parts. Calling it makes what a graphmem factory returns: (model, inputs, loss)."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, Device], Batch]
    loss: Callable[[Any, Any], Tensor]

    def __call__(self, batch: int = 1) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
        inputs, targets = self.make_batch(batch, None)
        return self.build(), inputs, Loss(self.loss, targets)


class Loss:
    """A loss with its targets, which graphmem moves to the device after the inputs."""

    def __init__(self, function: Callable[[Any, Any], Tensor], targets: Tensor | None) -> None:
        self.function = function
        self.targets = targets

    def __call__(self, output: Any) -> Tensor:
        return self.function(output, self.targets)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over the last dimension, whatever stands before it."""
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))


def own_loss(output: Any, _: None) -> Tensor:
    """The loss that a transformers model returns when it is given labels."""
    loss: Tensor = output.loss
    return loss


def vectors(width: int) -> Callable[[int, Device], Batch]:
    """Feature vectors with one class each."""
    return lambda batch, device: (torch.zeros(batch, width, device=device), _classes(batch, device=device))


def images(side: int = 224) -> Callable[[int, Device], Batch]:
    """Square colour images with one class each."""
    return lambda batch, device: (torch.zeros(batch, 3, side, side, device=device), _classes(batch, device=device))


def image_pairs(side: int) -> Callable[[int, Device], Batch]:
    """Square colour images with an image as the target."""
    return lambda batch, device: (
        torch.zeros(batch, 3, side, side, device=device),
        torch.zeros(batch, 3, side, side, device=device),
    )


def tokens(length: int) -> Callable[[int, Device], Batch]:
    """Token sequences with a target token at every position."""
    return lambda batch, device: (_classes(batch, length, device=device), _classes(batch, length, device=device))


def labels_are_inputs(length: int) -> Callable[[int, Device], Batch]:
    """Token sequences for a model that is given them as its labels too."""
    return lambda batch, device: (_classes(batch, length, device=device), None)


def _classes(*shape: int, device: Device) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long, device=device)
