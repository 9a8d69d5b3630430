"""What a batch is, for every task of the manifest: inputs, and targets where the step trains.

Values are zeros, for only shapes count. Every maker takes the entry's sizes and returns the keyword arguments of the
model; with targets among them a transformers model makes its own loss. Losses that a library leaves to its user stand
here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Characters of a transcript, samples of ten seconds at 16 kHz, and frames of Whisper's half minute.
_SAMPLES, _FRAMES = 160_000, 3000


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of one batch. ``length`` is in tokens, ``side`` in pixels."""

    batch: int
    length: int
    side: int
    training: bool


Inputs = dict[str, Any]
Maker = Callable[[nn.Module, BatchSizes], Inputs]


def inputs_of(task: str, model: nn.Module, sizes: BatchSizes) -> Inputs:
    """The keyword arguments of the model for one batch of ``task``."""
    return _TASKS[task](model, sizes)


def _text(_: nn.Module, sizes: BatchSizes) -> Inputs:
    ids = _tokens(sizes)
    return {"input_ids": ids, "labels": ids} if sizes.training else {"input_ids": ids}


def _text_pairs(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return {"input_ids": _tokens(sizes), "labels" if sizes.training else "decoder_input_ids": _tokens(sizes)}


def _text_classes(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return _with_labels({"input_ids": _tokens(sizes)}, sizes, sizes.batch)


def _text_tokens(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return _with_labels({"input_ids": _tokens(sizes)}, sizes, sizes.batch, sizes.length)


def _image_classes(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return _with_labels({"pixel_values": _images(sizes)}, sizes, sizes.batch)


def _image_segments(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return _with_labels({"pixel_values": _images(sizes)}, sizes, sizes.batch, sizes.side, sizes.side)


def _image_boxes(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return {"pixel_values": _images(sizes)}


def _image_text(_: nn.Module, sizes: BatchSizes) -> Inputs:
    inputs: Inputs = {"input_ids": _tokens(sizes), "pixel_values": _images(sizes)}
    return {**inputs, "return_loss": True} if sizes.training else inputs


def _speech_text(model: nn.Module, sizes: BatchSizes) -> Inputs:
    bins = model.config.num_mel_bins
    name = "labels" if sizes.training else "decoder_input_ids"
    return {"input_features": torch.zeros(sizes.batch, bins, _FRAMES), name: _tokens(sizes)}


def _speech_characters(_: nn.Module, sizes: BatchSizes) -> Inputs:
    return _with_labels({"input_values": torch.zeros(sizes.batch, _SAMPLES)}, sizes, sizes.batch, sizes.length)


_TASKS: dict[str, Maker] = {
    "text": _text,
    "text-pairs": _text_pairs,
    "text-classes": _text_classes,
    "text-tokens": _text_tokens,
    "image-classes": _image_classes,
    "image-segments": _image_segments,
    "image-boxes": _image_boxes,
    "image-text": _image_text,
    "speech-text": _speech_text,
    "speech-characters": _speech_characters,
}
TASKS = tuple(_TASKS)


def loss_of(task: str, sizes: BatchSizes) -> Callable[[Any], Tensor] | None:
    """The loss of a task whose model makes none itself, else None."""
    return MatchedBoxes(sizes.batch) if task == "image-boxes" else None


class MatchedBoxes:
    """DETR's loss for images of ``objects`` objects each, the first predictions taken as the matched ones.

    The real loss matches predictions to objects by value, on the host; which ones match changes no size.
    """

    def __init__(self, batch: int, objects: int = 20) -> None:
        classes = torch.zeros(batch, objects, dtype=torch.long)
        self.targets = (classes, torch.zeros(batch, objects, 4))

    def __call__(self, output: Any) -> Tensor:
        classes, boxes = self.targets
        matched = boxes.shape[1]
        scores = output.logits
        wanted = functional.pad(classes, (0, scores.shape[1] - matched), value=scores.shape[2] - 1)
        kind = functional.cross_entropy(scores.transpose(1, 2), wanted)
        return kind + 5 * functional.l1_loss(output.pred_boxes[:, :matched], boxes)


def _with_labels(inputs: Inputs, sizes: BatchSizes, *shape: int) -> Inputs:
    return {**inputs, "labels": torch.zeros(shape, dtype=torch.long)} if sizes.training else inputs


def _tokens(sizes: BatchSizes) -> Tensor:
    return torch.zeros(sizes.batch, sizes.length, dtype=torch.long)


def _images(sizes: BatchSizes) -> Tensor:
    return torch.zeros(sizes.batch, 3, sizes.side, sizes.side)
