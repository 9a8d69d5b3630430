"""Tensors and modules that several groups of cases use."""

from __future__ import annotations

from torch import nn

from tests.recorded.cases.functions.registry import BF16, index, t

IMAGE = t(8, 64, 56, 56)
IMAGE_HALF = t(8, 64, 56, 56, dtype=BF16)
IMAGE_LAST = t(8, 64, 56, 56, layout="channels_last")
SERIES = t(8, 64, 1000)
VOLUME = t(2, 16, 20, 28, 28)
VOLUME_LAST = t(2, 16, 20, 28, 28, layout="channels_last")
SMALL = t(4, 32, 28, 28)
X, XH = t(64, 4096), t(64, 4096, dtype=BF16)
SCORES = t(8, 128, 1000)
LOGITS_2D, LABELS_2D = t(4, 21, 128, 128), index(4, 128, 128)
Y = t(64, 4096, grad=False)
TABLE = t(10000, 256)
MODEL = t(8, 128, 512)
MLP = lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))  # noqa: E731
TOKENS = t(1024, 512)
