"""Convolutions of networks as people write them by hand, drawn at random: a network with its widths, its images and its
batch, and of that one convolution.

Widths and sides are those of tutorials, papers and homework, and in a third of the networks any number: there channels
are odd, images small, and filters 4x4, 5x5 or 9x9 more often than in the networks of libraries.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

#: Channels, filters, sides, kernel, strides, paddings, dilations, groups.
Layer = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
Sizes = int | tuple[int, ...]

BATCHES = [1, 2, 4, 8, 8, 10, 16, 16, 16, 20, 32, 32, 32, 50, 64, 64, 64, 64, 64, 100, 128, 128, 128, 256, 256, 512,
            1000, 1024]  # fmt: skip
#: Those of volumes.
VOLUME_BATCHES = BATCHES[:13]
_SIDES = [28, 28, 28, 32, 32, 32, 32, 48, 64, 64, 64, 96, 128, 128, 84, 100, 112, 150, 160, 192, 224, 256]
_WIDTHS = [4, 6, 8, 8, 10, 12, 16, 16, 16, 20, 24, 32, 32, 32, 32, 32, 48, 50, 64, 64, 64, 64, 64, 96, 100, 128, 128]
_STEPS: list[Sizes] = [1, 1, 1, 2, (1, 2), (2, 1)]
_POOLS: list[Sizes] = [2, 2, (1, 2), (2, 1), (1, 4)]
_LETTER_POOLS: list[Sizes] = [1, (2, 1)]
_WORD_FILTERS: list[Sizes] = [(10, 4), 3, 3, 1]
_WORD_PADDINGS: list[Sizes] = [0, (5, 1)]
_VIDEO_FILTERS: list[Sizes] = [3, 3, 3, (1, 3, 3), (3, 1, 1), (3, 7, 7)]
_VIDEO_STEPS: list[Sizes] = [1, 1, 2, (1, 2, 2)]
_VIDEO_POOLS: list[Sizes] = [2, (1, 2, 2)]
#: How often the first layer of a network is taken, whose images are the largest and whose copies decide a peak.
_FIRST_SHARE = 0.2
_INPUTS = [1, 1, 1, 3, 3, 3, 3, 3, 2, 4, 6]


class _Network:
    """Follows a network's images from layer to layer, and notes its convolutions."""

    def __init__(self, pick: random.Random, channels: int, *sides: int) -> None:
        self.layers: list[Layer] = []
        self.channels, self.sides = channels, sides
        self._odd = pick.random() < 0.35
        self._pick = pick

    def width(self) -> int:
        """The width of a network's first stage."""
        return self._pick.randint(2, 130) if self._odd else self._pick.choice(_WIDTHS)

    def conv(
        self, filters: int, taps: Sizes, stride: Sizes = 1, padding: Sizes | None = None, dilation: int = 1,
        groups: int = 1,
    ) -> None:  # fmt: skip
        """A layer; its padding keeps the sides if none is said. One that does not fit is left out."""
        kernel, strides = self._sizes(taps), self._sizes(stride)
        paddings = tuple(k // 2 * dilation for k in kernel) if padding is None else self._sizes(padding)
        every = zip(self.sides, kernel, strides, paddings, strict=True)
        sides = tuple((side + 2 * pad - dilation * (k - 1) - 1) // step + 1 for side, k, step, pad in every)
        if min(sides) < 1 or filters < 1:
            return
        dilations = self._sizes(dilation)
        self.layers.append((self.channels, filters, self.sides, kernel, strides, paddings, dilations, groups))
        self.channels, self.sides = filters, sides

    def transposed(self, filters: int, taps: Sizes, stride: Sizes = 2, padding: Sizes = 0, extra: int = 0) -> None:
        """A transposed layer: that of the convolution from its output to its input."""
        kernel, strides, paddings = self._sizes(taps), self._sizes(stride), self._sizes(padding)
        every = zip(self.sides, kernel, strides, paddings, strict=True)
        sides = tuple((side - 1) * step - 2 * pad + k + (extra if step > 1 else 0) for side, k, step, pad in every)
        if min(sides) < 1 or filters < 1:
            return
        self.layers.append((filters, self.channels, sides, kernel, strides, paddings, self._sizes(1), 1))
        self.channels, self.sides = filters, sides

    def pool(self, by: Sizes = 2) -> None:
        self.sides = tuple(max(1, side // step) for side, step in zip(self.sides, self._sizes(by), strict=True))

    def grow(self, by: int = 2) -> None:
        self.sides = tuple(side * by for side in self.sides)

    def _sizes(self, value: Sizes) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * len(self.sides)


def _side(pick: random.Random) -> int:
    return pick.choice(_SIDES) if pick.random() < 0.85 else pick.randint(8, 300)


def _wider(pick: random.Random, width: int, most: int = 1024) -> int:
    step = pick.choice([1, 1, 2, 2, 2, 2, 2, 1.5, 4])
    return max(1, min(most, int(width * step)))


def _classifier(pick: random.Random) -> _Network:
    """Convolutions and pooling, for digits and small photographs."""
    side = _side(pick)
    net = _Network(pick, pick.choice(_INPUTS), side, side)
    width, taps, same = net.width(), pick.choice([3, 3, 3, 3, 5, 5, 7]), pick.random() < 0.6
    strided = pick.random() < 0.25
    for stage in range(pick.randint(2, 5)):
        for layer in range(pick.choice([1, 1, 2, 2, 3])):
            net.conv(width, taps if stage < 2 else min(taps, 3), 2 if strided and not layer else 1, None if same else 0)
        if not strided:
            net.pool()
        width = _wider(pick, width)
    if pick.random() < 0.2:
        net.conv(pick.choice([10, 100, 2]), 1)
    return net


def _residual(pick: random.Random) -> _Network:
    """ResNets of 20 layers and their wide kin."""
    side = pick.choice([32, 32, 32, 28, 64, 96, 48, _side(pick)])
    net = _Network(pick, pick.choice([3, 3, 3, 1]), side, side)
    width = pick.choice([16, 16, 16, 32, 64, net.width()])
    net.conv(width, *pick.choice([(3, 1), (3, 1), (3, 1), (7, 2), (5, 2)]))
    widen, bottleneck = pick.choice([1, 1, 1, 2, 4, 8, 10]), pick.random() < 0.2
    for stage in range(pick.choice([3, 3, 4])):
        wide, step = width * widen << stage, 1 if stage == 0 else 2
        if wide > 2048:
            break
        inner, sides = net.channels, net.sides
        net.conv(wide, 1, step, 0)
        net.channels, net.sides = inner, sides
        if bottleneck:
            net.conv(max(1, wide // 4), 1)
            net.conv(max(1, wide // 4), 3, step)
            net.conv(wide, 1)
        else:
            net.conv(wide, 3, step)
            net.conv(wide, 3)
    return net


def _generator(pick: random.Random) -> _Network:
    """DCGAN's generator and critic."""
    net = _Network(pick, pick.choice([100, 100, 100, 128, 64, 50, 10, 256]), 1, 1)
    base, depth = pick.choice([32, 64, 64, 64, 128, 28, 48, net.width()]), pick.choice([2, 3, 3, 3, 4, 4])
    colours = pick.choice([1, 3, 3, 3])
    if pick.random() < 0.5:
        net.transposed(base << depth, pick.choice([4, 4, 4, 7]), 1, 0)
        for stage in reversed(range(depth)):
            net.transposed(base << stage, *pick.choice([(4, 2, 1), (4, 2, 1), (4, 2, 1), (3, 2, 1, 1), (5, 2, 2, 1)]))
        net.transposed(colours, 4, 2, 1)
        return net
    net.channels, net.sides = colours, (pick.choice([28, 32, 64, 64, 64, 128]),) * 2
    taps, padding = pick.choice([(4, 1), (4, 1), (4, 1), (3, 1), (5, 2)])
    for stage in range(depth + 1):
        net.conv(base << stage, taps, 2, padding)
    net.conv(1, min(4, *net.sides), 1, 0)
    return net


def _autoencoder(pick: random.Random) -> _Network:
    """Autoencoders, variational and with codebooks."""
    side = _side(pick)
    net = _Network(pick, pick.choice([1, 3, 3, 3]), side, side)
    first, width, depth = net.channels, net.width(), pick.randint(2, 5)
    taps, padding, extra = pick.choice([(3, 1, 1), (3, 1, 1), (4, 1, 0), (4, 1, 0), (5, 2, 1), (3, 0, 0), (2, 0, 0)])
    widths = [first]
    for _ in range(depth):
        widths.append(width)
        net.conv(width, taps, 2, padding)
        if pick.random() < 0.4:
            net.conv(width, 3)
            net.conv(width, 1)
        width = _wider(pick, width, 512)
    for width in reversed(widths[:-1]):
        if pick.random() < 0.8:
            net.transposed(width, taps, 2, padding, extra)
        else:
            net.grow()
            net.conv(width, 3)
    if pick.random() < 0.4:
        net.channels = widths[1]
        net.conv(first, 3)
    return net


def _player(pick: random.Random) -> _Network:
    """Agents that see frames: DQN's and PPO's network, IMPALA's."""
    side = pick.choice([84, 84, 84, 84, 64, 64, 96, 44, 80, 105, 36])
    net = _Network(pick, pick.choice([4, 4, 4, 4, 3, 3, 1, 12, 9]), side, side)
    if pick.random() < 0.75:
        width = pick.choice([32, 32, 32, 16, net.width()])
        net.conv(width, 8, 4, 0)
        net.conv(2 * width, 4, 2, 0)
        net.conv(pick.choice([64, 2 * width]), 3, 1, 0)
        return net
    for width in pick.choice([(16, 32, 32), (32, 64, 64), (32, 32, 32, 32)]):
        net.conv(width, 3)
        net.sides = tuple((side + 1) // 2 for side in net.sides)
        net.conv(width, 3)
    return net


def _unet(pick: random.Random) -> _Network:
    side = pick.choice([32, 64, 96, 128, 128, 160, 224, 240, 256, 256, 320, 388, 512, 572])
    net = _Network(pick, pick.choice(_INPUTS), side, side)
    base, depth, same = (
        pick.choice([8, 16, 32, 32, 64, 64, net.width()]),
        pick.choice([2, 3, 4, 4]),
        pick.random() < 0.9,
    )
    _unet_layers(pick, net, base, depth, None if same else 0, pick.choice([1, 2, 3, 4, 11, 12, 21, 19]))
    return net


def _unet_layers(pick: random.Random, net: _Network, base: int, depth: int, padding: int | None, classes: int) -> None:
    for stage in range(depth + 1):
        net.conv(base << stage, 3, 1, padding)
        net.conv(base << stage, 3, 1, padding)
        if stage < depth:
            net.pool()
    for stage in reversed(range(depth)):
        if pick.random() < 0.7:
            net.transposed(base << stage, 2, 2)
            net.channels = base << stage + 1
        else:
            net.grow()
            net.channels = (base << stage + 1) + pick.choice([0, base << stage])
        net.conv(base << stage, 3, 1, padding)
        net.conv(base << stage, 3, 1, padding)
    net.conv(classes, 1)


def _diffusion(pick: random.Random) -> _Network:
    """U-Nets of denoising diffusion: residual blocks, attention by 1x1, down and up by 2."""
    side = pick.choice([16, 28, 32, 32, 32, 64, 64, 128])
    net = _Network(pick, pick.choice([1, 3, 3, 4]), side, side)
    colours, base = net.channels, pick.choice([16, 32, 32, 64, 64, 96, 128, 128, net.width()])
    net.conv(base, pick.choice([3, 3, 7]))
    widths = [base * by for by in pick.choice([(1, 2, 4), (1, 2, 4, 8), (1, 2, 2, 2), (1, 2, 2, 4), (1, 1, 2, 2, 4)])]
    before = base
    for width in widths:
        net.conv(width, 3)
        net.conv(width, 3)
        net.conv(before, 1)
        net.channels = before = width
        if pick.random() < 0.3:
            net.conv(pick.choice([3 * width, 128 * 3, width]), 1)
            net.channels = pick.choice([128, width])
            net.conv(width, 1)
        net.conv(width, *pick.choice([(4, 2, 1), (3, 2, 1), (1, 1, 0)]))
    for width in reversed(widths):
        net.channels = 2 * width if pick.random() < 0.6 else width + before
        net.conv(width, 3)
        net.conv(width, 1)
        if pick.random() < 0.5:
            net.transposed(width, 4, 2, 1)
        else:
            net.grow()
            net.conv(width, 3)
        before = width
    net.conv(colours, pick.choice([1, 3]))
    return net


def _image_to_image(pick: random.Random) -> _Network:
    """Super-resolution, transfer of styles, denoising: images in, images out."""
    side = pick.choice([24, 32, 33, 40, 48, 48, 64, 64, 96, 128, 128, 256, 256, 240])
    net = _Network(pick, pick.choice([1, 3, 3, 3]), side, side)
    colours, width, taps = (
        net.channels,
        pick.choice([64, 64, 32, 16, 56, 128, net.width()]),
        pick.choice([9, 9, 3, 5, 7]),
    )
    net.conv(width, taps)
    if pick.random() < 0.3:
        net.conv(width // 2 or 1, pick.choice([1, 3, 5]))
        net.conv(colours, pick.choice([3, 5]))
        return net
    downs = pick.choice([0, 0, 2])
    for _ in range(downs):
        width *= 2
        net.conv(width, pick.choice([3, 4]), 2, 1)
    net.conv(width, 3)
    net.conv(width, 3, 1, 0 if downs else 1)
    for _ in range(downs):
        width //= 2
        net.transposed(width, 3, 2, 1, 1)
    if not downs:
        by = pick.choice([2, 2, 3, 4])
        net.conv(pick.choice([width, colours]) * by * by, 3)
        net.channels = max(1, net.channels // (by * by))
        net.grow(by)
    net.conv(colours, taps)
    return net


def _siamese(pick: random.Random) -> _Network:
    side = pick.choice([105, 105, 100, 92, 112, 64])
    net = _Network(pick, pick.choice([1, 1, 3]), side, side)
    for width, taps in pick.choice(
        [((64, 10), (128, 7), (128, 4), (256, 4)), ((4, 3), (8, 3), (8, 3)), ((32, 5), (64, 5))]
    ):
        net.conv(width, taps, 1, pick.choice([0, 0, taps // 2]))
        net.pool()
    return net


def _dilated(pick: random.Random) -> _Network:
    """Segmentation by dilated filters, and their pyramids."""
    side = pick.choice([28, 32, 33, 41, 60, 64, 65, 128])
    net = _Network(pick, pick.choice([21, 32, 64, 128, 256, 512]), side, side)
    width = pick.choice([32, 64, 128, 256, net.width()])
    for dilation in pick.choice([(1, 2, 4, 8), (6, 12, 18), (2, 4), (1, 1, 2, 4, 8, 16)]):
        net.conv(width, 3, 1, None, dilation)
        if pick.random() < 0.3:
            net.conv(width, 1)
    return net


def _branches(pick: random.Random) -> _Network:
    """Blocks of several filters beside each other, densely connected ones, squeezes: widths that are sums."""
    side = pick.choice([7, 8, 14, 16, 28, 32, 56])
    net = _Network(pick, 12 * pick.randint(1, 30) + pick.choice([0, 16, 24, 5]), side, side)
    inner = net.channels
    for width, taps in [(64, 1), (96, 3), (128, 3), (16, 1), (32, 5), (12, 3), (24, 3), (48, 1)]:
        net.conv(pick.choice([width, net.width()]), taps)
        if pick.random() < 0.6:
            net.channels = inner
    return net


def _mobile(pick: random.Random) -> _Network:
    """Depthwise and grouped layers of small images."""
    side = pick.choice([7, 8, 14, 16, 28, 32, 56, 64, 96])
    groups = pick.choice([0, 0, 2, 3, 4, 4, 8, 8, 16, 32])
    net = _Network(pick, 1, side, side)
    inner = pick.choice([4, 8, 8, 16, 16, 24, 32, pick.randint(3, 40)])
    net.channels = groups * inner if groups else pick.choice([16, 24, 32, 48, 64, 96, 128, 144, 192, 256, 384, 512])
    for _ in range(2):
        net.conv(net.channels, pick.choice([3, 3, 3, 5]), pick.choice([1, 1, 2]), None, 1, groups or net.channels)
    return net


def _spectrogram(pick: random.Random) -> _Network:
    """Sounds as images, electrodes as rows: sides and filters that are no squares."""
    high, wide = pick.choice([(40, 101), (64, 81), (80, 128), (128, 431), (128, 216), (13, 44), (22, 1000), (64, 128),
                              (257, 100), (128, 64), (pick.randint(8, 200), pick.randint(8, 500))])  # fmt: skip
    net = _Network(pick, pick.choice([1, 1, 1, 2, 3]), high, wide)
    width = net.width()
    for _ in range(pick.randint(2, 4)):
        taps = pick.choice([(3, 3), (3, 3), (3, 3), (1, 7), (5, 3), (high, 1), (1, 25), (20, 8), (1, 3), (3, 1)])
        net.conv(width, taps, pick.choice(_STEPS))
        if pick.random() < 0.7:
            net.pool(pick.choice(_POOLS))
        width = _wider(pick, width, 512)
    return net


def _row(pick: random.Random) -> _Network:
    """One dimension: sounds, series, characters. PyTorch gives cuDNN images of one row."""
    length = pick.choice([50, 64, 96, 100, 128, 150, 187, 200, 256, 300, 500, 512, 600, 1000, 1014, 1024, 2048, 3000,
                          4096, 8000, 16000, 16384, pick.randint(10, 5000)])  # fmt: skip
    net = _Network(pick, pick.choice([1, 1, 1, 2, 3, 6, 8, 9, 12, 16, 22, 40, 64, 80, 70, 128, 300, 512]), 1, length)
    width, taps = net.width(), pick.choice([2, 3, 3, 3, 5, 5, 7, 7, 8, 9, 11, 15, 16, 25, 31, 80])
    style, dilation = pick.choice(["pool", "pool", "stride", "dilated"]), 1
    for stage in range(pick.randint(2, 6)):
        step = pick.choice([2, 2, 4, 8]) if style == "stride" else 1
        wide = (taps - 1) * dilation if style == "dilated" else taps // 2
        paddings: list[Sizes] = [0, (0, wide)]
        padding = pick.choice(paddings)
        net.conv(width, (1, taps), (1, step), padding, dilation)
        if style == "pool":
            net.pool((1, pick.choice([2, 2, 3, 4])))
        dilation *= 2 if style == "dilated" else 1
        width = _wider(pick, width, 512)
        taps = taps if stage or taps < 20 else 3
    if pick.random() < 0.3:
        net.transposed(width, (1, 4), (1, 2), (0, 1))
    return net


def _volume(pick: random.Random) -> _Network:
    """U-Nets and classifiers of scans, and of videos."""
    if pick.random() < 0.3:
        frames, side = pick.choice([8, 10, 16, 16, 32, 64]), pick.choice([32, 56, 64, 112, 112, 128, 224])
        net = _Network(pick, pick.choice([1, 3, 3]), frames, side, side)
        width = net.width()
        for stage in range(pick.randint(2, 5)):
            net.conv(width, pick.choice(_VIDEO_FILTERS), pick.choice(_VIDEO_STEPS))
            net.pool(pick.choice(_VIDEO_POOLS) if stage else (1, 2, 2))
            width = _wider(pick, width, 512)
        return net
    side = pick.choice([8, 16, 16, 24, 32, 32, 32, 48, 64, 64, 64, 80, 96, 96, 128])
    sides = (side, side, side) if pick.random() < 0.6 else (pick.choice([16, 32, side, 40, 155]), side, side)
    net = _Network(pick, pick.choice([1, 1, 1, 2, 4]), *sides)
    base = pick.choice([4, 8, 8, 16, 16, 16, 32, 32, 64, net.width()])
    _unet_layers(pick, net, base, pick.choice([1, 2, 3, 3, 4]), None, pick.choice([1, 2, 3, 4, 14]))
    return net


# --- sounds -----------------------------------------------------------------------------------------------------------


def _sound(pick: random.Random) -> _Network:
    """Networks over waves, series and points, by the names they have in papers: one dimension throughout."""
    return pick.choice(_SOUNDS)(pick)


def _of_length(pick: random.Random, channels: int, *lengths: int) -> _Network:
    return _Network(pick, channels, 1, pick.choice(lengths) if pick.random() < 0.8 else pick.randint(16, 48000))


def _waves(pick: random.Random) -> _Network:
    """M5 and its kin, SincNet, SampleCNN, wav2vec's encoder: long filters in strides over the raw wave."""
    net = _of_length(pick, pick.choice([1, 1, 1, 1, 2]), 8000, 16000, 16000, 22050, 32000, 44100, 48000, 59049)
    width, most = net.width(), pick.choice([128, 256, 512])
    taps, step = pick.choice([(80, 4), (80, 4), (80, 16), (80, 16), (251, 1), (251, 4), (160, 4), (64, 8), (64, 2),
                              (32, 16), (10, 5), (3, 3), (7, 2), (9, 4), (16, 8), (128, 32), (400, 160),
                              (pick.randint(4, 256), pick.randint(1, 40))])  # fmt: skip
    net.conv(width, (1, taps), (1, step), (0, pick.choice([0, 0, 0, taps // 2])))
    taps, pool = pick.choice([2, 3, 3, 3, 5]), pick.choice([1, 2, 3, 4, 4])
    for _ in range(pick.randint(2, 6)):
        net.pool((1, pool))
        net.conv(width, (1, taps), (1, 1 if pool > 1 else 2), (0, pick.choice([0, taps // 2])))
        width = min(most, _wider(pick, width))
    return net


def _dilated_waves(pick: random.Random) -> _Network:
    """WaveNet and temporal convolutional networks: filters that reach further from layer to layer."""
    length = pick.choice([100, 200, 256, 500, 784, 1000, 4000, 8000, 16000])
    net = _of_length(pick, pick.choice([1, 3, 16, 22, 32, 64, 80, 128, 256]), length)
    width, taps, causal = net.width(), pick.choice([2, 2, 3, 3, 5, 7, 8]), pick.random() < 0.5
    skip = pick.choice([width, width, 256, 128])
    net.conv(width, (1, pick.choice([1, 1, taps])))
    for dilation in (1 << stage for stage in range(pick.choice([4, 6, 8, 10]))):
        wide, sides = (taps - 1) * dilation, net.sides
        if causal:  # padded by a layer of its own
            net.sides = (1, sides[1] + wide)
        net.conv(width, (1, taps), 1, (0, 0 if causal else pick.choice([wide, wide // 2])), dilation)
        net.conv(pick.choice([width, skip]), 1)
        net.channels, net.sides = width, sides
    return net


def _vocoder(pick: random.Random) -> _Network:
    """HiFi-GAN's and MelGAN's generator: transposed layers, and blocks of long filters."""
    net = _of_length(pick, pick.choice([80, 80, 80, 64, 100, 128, 192]), 16, 32, 32, 50, 64, 100, 200)
    width = pick.choice([128, 256, 256, 512])
    net.conv(width, (1, 7), 1, (0, 3))
    for step in pick.choice([(8, 8, 4), (8, 8, 2, 2), (5, 4, 4, 2), (8, 4, 2)]):
        width //= 2
        taps = pick.choice([2 * step, 2 * step, step])
        net.transposed(width, (1, taps), (1, step), (0, (taps - step) // 2))
        taps = pick.choice([3, 3, 7, 11])
        for dilation in (1, pick.choice([3, 5, 9])):
            net.conv(width, (1, taps), 1, (0, taps // 2 * dilation), dilation)
    net.conv(1, (1, 7), 1, (0, 3))
    return net


def _wave_unet(pick: random.Random) -> _Network:
    """Wave-U-Net, Demucs, autoencoders of waves and series, codecs."""
    net = _of_length(pick, pick.choice([1, 1, 2, 8, 12]), 1000, 1024, 4096, 8192, 16000, 16384, 32000, 44100)
    base, colours, depth = pick.choice([8, 16, 24, 32, 48, 64, net.width()]), net.channels, pick.randint(2, 5)
    taps, step, padding, extra = pick.choice(
        [(8, 4, 2, 0), (8, 4, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1), (16, 2, 7, 0), (15, 1, 7, 0), (5, 2, 2, 1),
         (7, 2, 3, 1), (9, 2, 4, 1)]
    )  # fmt: skip
    widths = [min(512, base * (stage + 1) if pick.random() < 0.3 else base << stage) for stage in range(depth)]
    for width in widths:
        net.conv(width, (1, taps), (1, step), (0, padding))
        if step == 1:
            net.pool((1, 2))
        elif pick.random() < 0.4:
            net.conv(2 * width, 1)
            net.channels = width
    for width in [*reversed(widths[:-1]), colours]:
        if step == 1:
            net.grow(2)
            net.sides = (1, net.sides[1])
            net.channels += width
            net.conv(width, (1, 5))
        else:
            net.transposed(width, (1, taps), (1, step), (0, padding), extra)
    return net


def _series(pick: random.Random) -> _Network:
    """Residual networks over electrocardiograms and sensors, InceptionTime, characters, words."""
    net = _of_length(
        pick, pick.choice([1, 2, 3, 6, 9, 12, 12, 19, 22, 64, 70, 100, 128, 300]), 50, 100, 128, 187, 200, 256, 300,
        500, 1000, 1014, 2000, 2500, 3000, 5000,
    )  # fmt: skip
    width, taps = net.width(), pick.choice([3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 20, 31, 39, 40])
    for stage in range(pick.randint(2, 5)):
        step = pick.choice([1, 1, 2, 2, 4]) if stage else pick.choice([1, 2])
        inner, sides = net.channels, net.sides
        if stage and pick.random() < 0.5:
            net.conv(width, 1, (1, step), 0)
            net.channels, net.sides = inner, sides
        net.conv(width, (1, taps), (1, step), (0, pick.choice([taps // 2, taps // 2, 0])))
        net.conv(width, (1, pick.choice([taps, 3])))
        if step == 1 and pick.random() < 0.5:
            net.pool((1, pick.choice([2, 2, 3, 4])))
        width = _wider(pick, width, 512)
    return net


def _points(pick: random.Random) -> _Network:
    """PointNet: shared layers over points, which are filters of one tap."""
    net = _of_length(pick, pick.choice([3, 3, 3, 6, 9]), 512, 1024, 1024, 2048, 2500, 4096)
    for width in pick.choice([(64, 64, 64, 128, 1024), (64, 128, 1024), (64, 128, 256), (32, 64, 128)]):
        net.conv(width, 1)
    return net


# --- images of their own sides ----------------------------------------------------------------------------------------


def _reader(pick: random.Random) -> _Network:
    """Words and captchas: rows of letters that are pooled in height alone."""
    high = pick.choice([32, 32, 32, 48, 50, 60, 64])
    net = _Network(pick, pick.choice([1, 1, 3]), high, pick.choice([100, 100, 128, 160, 200, 256, 320, 512]))
    for stage, width in enumerate(pick.choice([(64, 128, 256, 256, 512, 512), (32, 64, 128, 128), (16, 32, 48, 64)])):
        net.conv(width, 3)
        net.pool(2 if stage < 2 else pick.choice(_LETTER_POOLS))
    net.conv(net.channels, 2, 1, 0)
    return net


def _keywords(pick: random.Random) -> _Network:
    """Spoken words as small spectrograms, with long filters."""
    sides = pick.choice([(101, 40), (98, 40), (49, 10), (32, 32), (99, 64), (40, 101), (63, 32), (81, 64)])
    net = _Network(pick, 1, *sides)
    taps = pick.choice([(20, 8), (10, 4), (8, 20), (3, 3), (5, 5), (32, 8)])
    width = pick.choice([64, 64, 172, 45, 19, 32, net.width()])
    net.conv(width, taps, pick.choice(_STEPS), pick.choice(_WORD_PADDINGS))
    net.pool(pick.choice(_POOLS))
    net.conv(net.channels, pick.choice(_WORD_FILTERS), 1, 0)
    return net


def _segments(pick: random.Random) -> _Network:
    """Segmentation of pictures of any sides: dilated pyramids, transposed filters that restore a picture."""
    high, wide = pick.choice([(360, 480), (256, 512), (240, 320), (321, 321), (128, 256), (352, 352), (384, 384),
                              (pick.randint(90, 400), pick.randint(90, 400))])  # fmt: skip
    net = _Network(pick, 3, high, wide)
    width = net.width()
    net.conv(width, pick.choice([3, 3, 5, 7]), 2)
    net.conv(2 * width, 3, pick.choice([1, 2]))
    net.conv(4 * width, 3, pick.choice([1, 2]))
    inner = net.channels
    for dilation in pick.choice([(2, 4), (6, 12, 18), (1, 2, 4, 8), (1, 1)]):
        net.conv(pick.choice([inner, width, 40, 64]), 3, 1, None, dilation)
        net.channels = inner
    net.channels = pick.choice([2, 12, 19, 21, 32])
    net.transposed(net.channels, *pick.choice([(2, 2, 0), (4, 2, 1), (8, 4, 2), (16, 8, 4)]))
    return net


_SOUNDS: list[Callable[[random.Random], _Network]] = [
    *[_waves] * 3, *[_dilated_waves] * 3, *[_vocoder] * 2, *[_wave_unet] * 2, *[_series] * 3, _points,
]  # fmt: skip
#: Networks over images, and how often each is drawn.
_IMAGES: list[Callable[[random.Random], _Network]] = [
    *[_classifier] * 5, *[_residual] * 3, *[_generator] * 4, *[_autoencoder] * 4, *[_player] * 2, *[_unet] * 3,
    *[_diffusion] * 4, *[_image_to_image] * 3, _siamese, _dilated, _branches, _mobile, _mobile, _spectrogram, _row,
]  # fmt: skip
NETWORKS: dict[str, list[Callable[[random.Random], _Network]]] = {
    "written": _IMAGES,
    "written row": [_row, _row, _spectrogram],
    "written volume": [_volume],
    "written sound": [_sound],
    "written plain": [*_IMAGES[:-1], *[_reader, _keywords, _segments] * 2],
}
#: Kinds that are asked in the types and the order in which such networks run where nobody thought of either.
PLAIN = ("written sound", "written plain")


def draw_layer(pick: random.Random, kind: str) -> dict[str, Any]:
    """A convolution of a network of one of ``NETWORKS``; all but its type and its memory format."""
    while True:
        layers = pick.choice(NETWORKS[kind])(pick).layers
        if layers:
            break
    names = ("channels", "filters", "sides", "kernel", "strides", "paddings", "dilations", "groups")
    batches = VOLUME_BATCHES if kind == "written volume" else BATCHES
    batch = pick.choice(batches) if pick.random() < 0.9 else pick.randint(1, 2 * batches[-1])
    is_first = kind in PLAIN and pick.random() < _FIRST_SHARE
    return {"batch": batch, **dict(zip(names, layers[0] if is_first else pick.choice(layers), strict=True))}
