"""Two small models of the loops, built from plain PyTorch: a transformer of three blocks and a convolutional net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 96, 3, 520, 64, 4


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class Transformer(nn.Module):
    """``wrap`` is how a block is called: for checkpointing."""

    def __init__(
        self,
        *,
        tied: bool = False,
        dropout: float = 0.0,
        wrap: Callable[..., Tensor] | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.wrap = wrap

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap is not None else block(x)
        return self.head(self.norm(x))


def mixed() -> nn.Module:
    model = Transformer()
    for block in model.blocks:
        block.up.bfloat16()
        block.down.bfloat16()
        block.norm_2.bfloat16()
    model.wrap = _mixed_precision_block
    return model


def _mixed_precision_block(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return block(x).float()


def transformers_model(**kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=520, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, **kwargs)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip


def tokens(device: Any = "cuda") -> tuple[Tensor, Tensor]:
    return tuple(torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device) for _ in range(2))


def images(device: Any = "cuda") -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 3, 32, 32, device=device), torch.zeros(4, dtype=torch.int64, device=device)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
