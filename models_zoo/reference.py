"""Nine small models of the common families, written with plain PyTorch operators.

The recorded runs in ``golden/pytorch/2.13/steps`` were made with these architectures on the CUDA build of PyTorch, so
the operators, the order in which parameters are registered and how long local variables live are what the tests rely
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .recipe import Recipe, cross_entropy, image_pairs, images, tokens, vectors


class Perceptron(nn.Module):
    """``depth`` hidden layers with ReLU between."""

    def __init__(self, inputs: int = 1024, hidden: int = 4096, depth: int = 4, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide_in, wide_out in pairwise([inputs, *[hidden] * depth]):
            layers += [nn.Linear(wide_in, wide_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TransformerBlock(nn.Module):
    """Pre-norm attention and a four times wider GELU layer, each with a residual."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.query_key_value(self.attention_norm(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in (query, key, value)
        )
        rate = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.narrow(functional.gelu(self.widen(self.mlp_norm(x)))))


class LanguageModel(nn.Module):
    """A GPT-2: learned positions, and output scores tied to the token embedding."""

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.checkpoint_blocks = False
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            [TransformerBlock(width, heads, dropout=dropout, causal=True) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        self.scores.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint_blocks else block(x)
        return self.scores(self.norm(x))


class VisionTransformer(nn.Module):
    """A ViT-S/16: patches by convolution, a class token, no dropout."""

    def __init__(self, side: int = 224, patch: int = 16, width: int = 384, heads: int = 6, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList([TransformerBlock(width, heads, causal=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x)[:, 0])


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norm; a projected shortcut where the shape changes."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        wide = 4 * middle
        self.reduce, self.reduce_norm = _convolution(channels, middle, 1)
        self.spatial, self.spatial_norm = _convolution(middle, middle, 3, stride)
        self.expand, self.expand_norm = _convolution(middle, wide, 1)
        self.relu = nn.ReLU(inplace=True)
        changes = stride > 1 or channels != wide
        self.shortcut = nn.Sequential(*_convolution(channels, wide, 1, stride)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.reduce_norm(self.reduce(x)))
        y = self.relu(self.spatial_norm(self.spatial(y)))
        y = self.expand_norm(self.expand(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


def _convolution(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


class ResidualNetwork(nn.Module):
    """A ResNet-50."""

    STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # (middle channels, blocks)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for stage, (middle, depth) in enumerate(self.STAGES):
            for block in range(depth):
                layers.append(Bottleneck(channels, middle, 2 if stage > 0 and block == 0 else 1))
                channels = 4 * middle
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.scores = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.features(x).flatten(1))


class UNet(nn.Module):
    """Three levels down and up with skip connections; group norm and SiLU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList([_pair(3, width), _pair(width, 2 * width), _pair(2 * width, 4 * width)])
        self.middle = _pair(4 * width, 8 * width)
        self.up = nn.ModuleList([_pair(12 * width, 4 * width), _pair(6 * width, 2 * width), _pair(3 * width, width)])
        self.colours = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([functional.interpolate(x, scale_factor=2, mode="nearest"), skipped.pop()], 1))
        return self.colours(x)


def _pair(channels: int, out: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with norm and activation."""
    layers: list[nn.Module] = []
    for source in (channels, out):
        layers += [nn.Conv2d(source, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()]
    return nn.Sequential(*layers)


class RecurrentModel(nn.Module):
    """A two-layer LSTM language model."""

    def __init__(self, vocabulary: int = 10000, width: int = 512) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.lstm(self.token(ids))[0])


mlp = Recipe(Perceptron, vectors(1024), cross_entropy)
mlp_big = Recipe(lambda: Perceptron(4096, 16384, 3), vectors(4096), cross_entropy)
gpt2 = Recipe(LanguageModel, tokens(1024), cross_entropy)
gpt2_drop = Recipe(lambda: LanguageModel(dropout=0.1), tokens(1024), cross_entropy)
gpt_tiny = Recipe(lambda: LanguageModel(8192, 256, 256, 4, 4), tokens(256), cross_entropy)
vit_s = Recipe(VisionTransformer, images(), cross_entropy)
resnet50 = Recipe(ResidualNetwork, images(), cross_entropy)
unet = Recipe(UNet, image_pairs(256), functional.mse_loss)
lstm = Recipe(RecurrentModel, tokens(128), cross_entropy)

MODELS: Mapping[str, Recipe] = {
    "mlp": mlp,
    "mlp_big": mlp_big,
    "gpt2": gpt2,
    "gpt2_drop": gpt2_drop,
    "gpt_tiny": gpt_tiny,
    "vit_s": vit_s,
    "resnet50": resnet50,
    "unet": unet,
    "lstm": lstm,
}
