"""Image classifiers whose usual library is torchvision, written out: VGG, DenseNet, Inception, and an MLP-Mixer.

Architectures as in their papers (arXiv 1409.1556, 1608.06993, 1512.00567, 2105.01601), with the operators that common
implementations use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .recipe import Recipe, cross_entropy, images

CLASSES = 1000


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by max pooling, and three linear layers."""

    WIDTHS = (64, 128, 256, 512, 512)

    def __init__(self, depths: tuple[int, ...], *, batch_norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in zip(self.WIDTHS, depths, strict=True):
            for _ in range(depth):
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                layers += [nn.BatchNorm2d(width)] if batch_norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        hidden = [nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True)]
        self.scores = nn.Sequential(*hidden, nn.Dropout(), nn.Linear(4096, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.pool(self.features(x)).flatten(1))


class DenseLayer(nn.Module):
    """Norm, 1x1 bottleneck, norm, 3x3: ``growth`` new channels from all channels so far."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        )
        self.second = nn.Sequential(
            nn.BatchNorm2d(4 * growth), nn.ReLU(inplace=True), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.second(self.first(torch.cat(features, 1)))


class DenseBlock(nn.Module):
    """Layers that each see every output before them."""

    def __init__(self, depth: int, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + index * growth, growth) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Dense blocks with halving transitions between them."""

    def __init__(self, depths: tuple[int, ...], growth: int = 32, stem: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, stem, 7, 2, 3, bias=False), nn.BatchNorm2d(stem)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = stem
        for index, depth in enumerate(depths):
            if index:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
            layers.append(DenseBlock(depth, channels, growth))
            channels += depth * growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
        self.features = nn.Sequential(*layers)
        self.scores = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.features(x).flatten(1))


def _conv(channels: int, width: int, kernel: int | tuple[int, int], stride: int = 1, pad: bool = True) -> nn.Sequential:
    """Convolution, batch norm and ReLU; padded to keep the size, or not at all."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = tuple(side // 2 for side in sides) if pad else (0, 0)
    convolution = nn.Conv2d(channels, width, sides, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width, eps=0.001), nn.ReLU(inplace=True))


class Branches(nn.Module):
    """Branches side by side, their outputs concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _inception_a(channels: int, pooled: int) -> Branches:
    return Branches(
        _conv(channels, 64, 1),
        nn.Sequential(_conv(channels, 48, 1), _conv(48, 64, 5)),
        nn.Sequential(_conv(channels, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels, pooled, 1)),
    )


def _inception_b(channels: int) -> Branches:
    return Branches(
        _conv(channels, 384, 3, 2, pad=False),
        nn.Sequential(_conv(channels, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, 2, pad=False)),
        nn.MaxPool2d(3, 2),
    )


def _inception_c(middle: int, channels: int = 768) -> Branches:
    across, down = (1, 7), (7, 1)
    return Branches(
        _conv(channels, 192, 1),
        nn.Sequential(_conv(channels, middle, 1), _conv(middle, middle, across), _conv(middle, 192, down)),
        nn.Sequential(
            _conv(channels, middle, 1), _conv(middle, middle, down), _conv(middle, middle, across),
            _conv(middle, middle, down), _conv(middle, 192, across),
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels, 192, 1)),
    )  # fmt: skip


def _inception_d(channels: int = 768) -> Branches:
    return Branches(
        nn.Sequential(_conv(channels, 192, 1), _conv(192, 320, 3, 2, pad=False)),
        nn.Sequential(
            _conv(channels, 192, 1), _conv(192, 192, (1, 7)), _conv(192, 192, (7, 1)), _conv(192, 192, 3, 2, pad=False)
        ),
        nn.MaxPool2d(3, 2),
    )


def _inception_e(channels: int) -> Branches:
    fork = Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))
    late = Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))
    return Branches(
        _conv(channels, 320, 1),
        nn.Sequential(_conv(channels, 384, 1), fork),
        nn.Sequential(_conv(channels, 448, 1), _conv(448, 384, 3), late),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels, 192, 1)),
    )


class InceptionV3(nn.Module):
    """Inception v3 for images of 299 pixels, without its auxiliary scores."""

    def __init__(self) -> None:
        super().__init__()
        stem = [_conv(3, 32, 3, 2, pad=False), _conv(32, 32, 3, pad=False), _conv(32, 64, 3), nn.MaxPool2d(3, 2)]
        stem += [_conv(64, 80, 1), _conv(80, 192, 3, pad=False), nn.MaxPool2d(3, 2)]
        blocks: list[nn.Module] = [_inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64)]
        blocks += [_inception_b(288), *(_inception_c(middle) for middle in (128, 160, 160, 192))]
        blocks += [_inception_d(), _inception_e(1280), _inception_e(2048)]
        self.features = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1))
        self.scores = nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Linear(2048, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.features(x))


class MixerBlock(nn.Module):
    """A perceptron over the patches and one over the channels, each with norm and residual."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = _perceptron(patches, width // 2)
        self.channels = _perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.channel_norm(x))


def _perceptron(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Mixer(nn.Module):
    """An MLP-Mixer with patches of 16 pixels."""

    def __init__(self, width: int = 512, depth: int = 8, side: int = 224) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock((side // 16) ** 2, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


vgg16 = Recipe(lambda: VGG((2, 2, 3, 3, 3), batch_norm=False), images(), cross_entropy)
vgg19_bn = Recipe(lambda: VGG((2, 2, 4, 4, 4), batch_norm=True), images(), cross_entropy)
densenet121 = Recipe(lambda: DenseNet((6, 12, 24, 16)), images(), cross_entropy)
inception_v3 = Recipe(InceptionV3, images(299), cross_entropy)
mlp_mixer = Recipe(Mixer, images(), cross_entropy)
