"""Losses that bring their own targets, which are part of a step's inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy:
    """Cross-entropy of class scores (last dimension: classes) against ``targets``, which move to the device with the
    inputs. Models with auxiliary heads give a named tuple or an object with ``logits``; the main scores count."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets

    def __call__(self, output: object) -> Tensor:
        from torch.nn import functional

        scores: Tensor = getattr(output, "logits", output)
        if isinstance(scores, (tuple, list)):
            scores = scores[0]
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), self.targets.reshape(-1))


class OfTargets:
    """``loss(output, targets)`` as a loss of the output alone; the targets move to the device with the inputs."""

    def __init__(self, loss: Callable[[object, object], Tensor], targets: object) -> None:
        self.loss, self.targets = loss, targets

    def __call__(self, output: object) -> Tensor:
        return self.loss(output, self.targets)
