"""Convolutions as image networks have them, drawn at random: what cuDNN is asked about to grow trees.

Sides follow the pyramids of networks (an image's side halved a few times, deeper where wider), widths come in the pairs
that blocks have.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests import places
from tests.oracles.cudnn.written import NETWORKS, PLAIN, draw_layer

GOLDENS = places.PYTORCH / "ops"
_IMAGES = [224] * 6 + [256] * 2 + [512, 512, 384, 320, 640, 299, 192, 160, 128, 288, 448, 600, 800, 96, 64, 32, 32]
_WIDTHS = [16, 24, 32, 32, 40, 48, 64, 64, 64, 64, 80, 96, 96, 112, 128, 128, 128, 160, 192, 192, 256, 256, 256, 256,
           320, 320, 384, 480, 512, 512, 512, 640, 768, 1024, 1024, 1280, 1536, 2048]  # fmt: skip
_BATCHES = [1, 1, 2, 4, 4, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64, 128, 128, 256, 12, 20, 24, 48, 96, 192]
_SIDES = [4, 5, 7, 7, 8, 10, 12, 14, 14, 16, 19, 20, 24, 28, 28, 32, 35, 38, 40, 48, 56, 56, 64, 75, 80, 96, 112, 128,
          160, 224, 256]  # fmt: skip
#: Elements of a tensor up to which a convolution is asked about.
_LARGEST = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A convolution; ``last``: channels_last; ``tf32``: may serve fp32. One dimension is two with a side of 1, as for
    PyTorch."""

    dtype: str
    batch: int
    channels: int
    filters: int
    sides: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    last: int
    tf32: int

    @staticmethod
    def cube(*, dims: int, side: int, taps: int, stride: int, padding: int, dilation: int, **others: Any) -> Shape:
        """One whose ``dims`` dimensions are alike."""
        return Shape(
            sides=(side,) * dims,
            kernel=(taps,) * dims,
            strides=(stride,) * dims,
            paddings=(padding,) * dims,
            dilations=(dilation,) * dims,
            **others,
        )

    @staticmethod
    def read(words: Sequence[str]) -> Shape:
        """The convolution that :meth:`question` wrote, without the direction."""
        dtype, *numbers = words
        values = [tuple(map(int, n.split("x"))) if 3 <= at <= 7 else int(n) for at, n in enumerate(numbers)]
        return Shape(dtype, *values)  # type: ignore[arg-type]

    @property
    def output_sides(self) -> tuple[int, ...]:
        every = zip(self.sides, self.kernel, self.strides, self.paddings, self.dilations, strict=True)
        return tuple((side + 2 * pad - dil * (taps - 1) - 1) // step + 1 for side, taps, step, pad, dil in every)

    @property
    def is_possible(self) -> bool:
        out = self.output_sides
        if min(out) < 1 or max(self.sides) < 2 or self.filters > 4096:
            return False
        values = max(self.channels * math.prod(self.sides), self.filters * math.prod(out))
        return bool(self.batch * values < _LARGEST)

    def question(self, direction: str) -> str:
        """The convolution in a line of text."""
        values = (
            "x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in self.__dict__.values()
        )
        return " ".join((direction, *values))


def draw(pick: random.Random, kind: str) -> Shape:
    """A convolution of one of ``KINDS``. Some may be among those that tests compare with: what is drawn depends on the
    seed alone."""
    while True:
        shape = KINDS[kind](pick)
        if shape.is_possible:
            return shape


def _precision(pick: random.Random) -> dict[str, Any]:
    fp32, fp16, bf16 = ("fp32", 0), ("fp16", 0), ("bf16", 0)
    last = [(name, 1) for name in ("fp32", "fp16", "bf16")]
    dtype, order = pick.choice([fp32] * 6 + [fp16] * 2 + [bf16] * 2 + last[:1] * 4 + last[1:] * 3)
    return {"dtype": dtype, "last": order, "tf32": int(dtype != "fp32" or pick.random() < 0.88)}


def _plain_precision(pick: random.Random) -> dict[str, Any]:
    """Types that networks have by default, and those of autocast; nothing in channels_last."""
    dtype = pick.choice(["fp32"] * 6 + ["fp16"] * 2 + ["bf16"] * 2)
    return {"dtype": dtype, "last": 0, "tf32": int(dtype != "fp32" or pick.random() < 0.92)}


def _batch(pick: random.Random) -> int:
    return pick.choice(_BATCHES) if pick.random() < 0.93 else pick.randint(1, 128)


def _width(pick: random.Random) -> int:
    kind = pick.random()
    if kind < 0.8:
        return pick.choice(_WIDTHS)
    return (
        16 * pick.randint(1, 40) if kind < 0.9 else 32 * pick.randint(1, 40) if kind < 0.96 else 8 * pick.randint(1, 64)
    )


def _side(pick: random.Random, width: int) -> int:
    """The side at a depth of the pyramid; wide layers are deep."""
    image = pick.choice(_IMAGES)
    depth = pick.randint(1, 5)
    if pick.random() < 0.75:
        depth = max(0, min(6, round(math.log2(max(width, 16) / 24)) + pick.choice([0, 0, 0, 1, 1, -1, -1, 2])))
    if image == 299 and pick.random() < 0.6:
        return pick.choice([149, 147, 73, 71, 35, 17, 8])
    return (image + (1 << depth) - 1) >> depth


def _padding(pick: random.Random, taps: int, dilation: int = 1) -> int:
    return taps // 2 * dilation if pick.random() < 0.95 else 0


def _layer(pick: random.Random) -> Shape:
    channels, taps = _width(pick), pick.choice([1] * 9 + [3] * 10 + [5] + [7] * (pick.random() < 0.4))
    stride = pick.choice([1] * 7 + [2] * 3)
    same = [channels] * 5 + [channels * 2] * 2 + [channels // 2] * 2
    pairs = [channels] * 2 + [channels * 4, channels // 4, channels * 2, channels // 2] * 2
    filters = max(pick.choice([*(pairs if taps == 1 else same), _width(pick), _width(pick)]), 8)
    dilation = pick.choice([1] * 30 + [2, 4]) if taps > 1 and stride == 1 else 1
    widest = max(channels, filters) if taps == 1 and stride == 1 else max(channels, filters // 2)
    return Shape.cube(
        dims=2, batch=_batch(pick), channels=channels, filters=filters, side=_side(pick, widest), taps=taps,
        stride=stride, padding=_padding(pick, taps, dilation), dilation=dilation, groups=1, **_precision(pick),
    )  # fmt: skip


def _loose(pick: random.Random) -> Shape:
    """Layers whose widths, side and batch have nothing to do with each other: necks, heads, pruned nets."""
    taps, stride = pick.choice([1, 1, 1, 3, 3, 3, 3, 5, 7]), pick.choice([1] * 4 + [2])
    dilation = pick.choice([1] * 20 + [2, 4]) if taps > 1 and stride == 1 else 1
    return Shape.cube(
        dims=2, batch=_batch(pick), channels=_width(pick),
        filters=_width(pick) if pick.random() < 0.9 else pick.randint(8, 2048),
        side=pick.choice(_SIDES) if pick.random() < 0.9 else pick.randint(4, 260), taps=taps, stride=stride,
        padding=pick.choice([taps // 2] * 4 + [0]) * dilation, dilation=dilation, groups=1, **_precision(pick),
    )  # fmt: skip


def _first(pick: random.Random) -> Shape:
    sides = [224] * 5 + [256, 256, 192, 160, 128, 112, 288, 299, 320, 384, 448, 512, 96, 64, 64, 64, 32, 32, 28, 48, 80]
    taps, stride = pick.choice(
        [(3, 1), (3, 1), (3, 2), (3, 2), (7, 2), (7, 2), (16, 16), (16, 16), (14, 14), (4, 4), (4, 4), (5, 1), (8, 8),
         (7, 4), (2, 2)]
    )  # fmt: skip
    side = pick.choice(sides)
    return Shape.cube(
        dims=2, batch=_batch(pick), channels=pick.choice([3] * 8 + [4] * 2 + [1, 2, 6]), filters=pick.choice(_WIDTHS),
        side=side if side >= 2 * taps else 224, taps=taps, stride=stride,
        padding=0 if taps == stride else _padding(pick, taps), dilation=1, groups=1, **_precision(pick),
    )  # fmt: skip


def _grouped(pick: random.Random) -> Shape:
    """ResNeXt's and RegNet's."""
    inner = pick.choice([4, 8, 8, 16, 16, 24, 24, 32, 32, 40, 48, 56, 64, 64, 72, 96, 112, 128])
    groups = pick.choice([2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 16, 18, 20, 32, 32, 64])
    channels, taps = inner * groups, pick.choice([1, 3, 3, 3, 3, 3, 3, 5])
    return Shape.cube(
        dims=2, batch=_batch(pick), channels=channels, filters=channels * pick.choice([1] * 5 + [2] * 2),
        side=_side(pick, channels), taps=taps, stride=pick.choice([1, 1, 1, 2]), padding=_padding(pick, taps),
        dilation=1, groups=groups, **_precision(pick),
    )  # fmt: skip


#: Channels of depthwise layers, with the sides they have in images of 224: MobileNet, MNASNet, EfficientNet, ConvNeXt.
_DEPTHWISE = [(16, 112), (24, 112), (32, 112), (48, 112), (64, 112), (72, 56), (88, 28), (96, 112), (96, 56), (96, 14),
              (128, 56), (144, 56), (192, 56), (192, 28), (120, 28), (200, 14), (240, 28), (240, 14), (256, 28),
              (288, 14), (336, 14), (384, 28), (384, 14), (480, 14), (512, 14), (576, 14), (576, 7), (672, 14),
              (672, 7), (768, 14), (768, 7), (960, 14), (960, 7), (1024, 14), (1024, 7), (1152, 7), (1536, 7),
              (1632, 7), (2048, 7)]  # fmt: skip
_DEPTHWISE_BATCHES = [1, 2, 4, 8, 8, 16, 16, 32, 32, 32, 64, 64, 64, 96, 128, 128, 128, 192, 200, 256, 256, 384, 512]


def _depthwise(pick: random.Random) -> Shape:
    """Where PyTorch gives them to cuDNN: channels_last, and NCHW in fp16 with small filters."""
    channels, side = pick.choice(_DEPTHWISE)
    if pick.random() < 0.25:
        channels = 8 * pick.randint(2, 256)
    image = pick.choice([224] * 8 + [128, 160, 192, 240, 256, 260, 288, 300, 320, 384, 448, 512, 86, 64, 32])
    side = max(4, min(side * image // 224, 224)) if pick.random() < 0.85 else pick.randint(4, 120)
    last = pick.random() < 0.85
    taps = pick.choice([3] * 5 + [5] * 3 + [7] * 4 + [9]) if last else pick.choice([3, 3, 5])
    dtype = pick.choice(["fp32"] * 4 + ["fp16", "bf16"] * 2) if last else "fp16"
    batch = pick.choice(_DEPTHWISE_BATCHES) if pick.random() < 0.8 else pick.randint(1, 512)
    return Shape.cube(
        dtype=dtype, dims=2, batch=batch, channels=channels, filters=channels, side=side, taps=taps,
        stride=pick.choice([1, 1, 1, 2]), padding=_padding(pick, taps), dilation=1, groups=channels,
        last=int(last), tf32=int(dtype != "fp32" or pick.random() < 0.75),
    )  # fmt: skip


def _volume(pick: random.Random) -> Shape:
    """Networks over volumes and videos: small batches, widths of U-Nets and residual networks."""
    channels = pick.choice([1, 3, 3, 4, 16, 32, 32, 64, 64, 128, 256, 512])
    taps, stride = pick.choice([(3, 1)] * 5 + [(3, 2), (1, 1), (5, 1), (2, 2), (7, 2)])
    return Shape.cube(
        dims=3, batch=pick.choice([1, 1, 2, 4, 8, 16]), channels=channels,
        filters=pick.choice([channels, channels * 2, channels // 2, 16, 32, 64, 128]) or 8,
        side=pick.choice([4, 7, 8, 14, 16, 20, 28, 32, 48, 56, 64, 80, 96, 112, 128]), taps=taps, stride=stride,
        padding=0 if taps == stride else taps // 2, dilation=1, groups=1, **_precision(pick),
    )  # fmt: skip


def _written(kind: str) -> Callable[[random.Random], Shape]:
    """Layers of networks that are written by hand."""
    precision = _plain_precision if kind in PLAIN else _precision
    return lambda pick: Shape(**draw_layer(pick, kind), **precision(pick))


#: Kinds of layers.
KINDS: dict[str, Callable[[random.Random], Shape]] = {
    "layer": _layer,
    "loose": _loose,
    "first": _first,
    "groups": _grouped,
    "depthwise": _depthwise,
    "volume": _volume,
    **{kind: _written(kind) for kind in NETWORKS},
}


def of_golden(line: dict[str, Any]) -> Shape:
    """The convolution of a line of the goldens."""
    return Shape.cube(
        dtype=line["dtype"], dims=line.get("dims", 2), batch=line["N"], channels=line["C"], filters=line["K"],
        side=line["HW"], taps=line["R"], stride=line["stride"], padding=line["pad"], dilation=line.get("dil", 1),
        groups=line["groups"], last=line["channels_last"], tf32=line.get("tf32", 1),
    )  # fmt: skip


@cache
def held_out() -> frozenset[Shape]:
    """Convolutions that the tests compare with."""
    found = set()
    for name in ("conv.jsonl.gz", "conv_plans.jsonl.gz"):
        with gzip.open(GOLDENS / name, "rt") as file:
            found |= {of_golden(json.loads(line)) for line in file}
    return frozenset(found)
