"""What a model family is to the engine, and the shape that its configuration describes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from graphmem.serving.vllm.layers import LinearMethod
from graphmem.serving.vllm.run import Tensor

#: What a call of attention allocates for so many tokens, and a context in which a compiled piece runs.
Attend: TypeAlias = Callable[[int], None]
Piece: TypeAlias = Callable[[], AbstractContextManager[None]]


class Family(ABC):
    """A model of one rank. Making it asks for its weights."""

    @abstractmethod
    def finish(self) -> None:
        """``process_weights_after_loading`` of every layer, in order."""

    @abstractmethod
    def forward(self, tokens: int) -> Tensor:
        """The last hidden states of so many tokens, without attention."""

    @abstractmethod
    def compiled(self, tokens: int, attend: Attend, piece: Piece, layers: int | None = None) -> Tensor:
        """The same as torch.compile makes it: in pieces, attention between them, of all layers or of the first."""

    @abstractmethod
    def logits(self, rows: int) -> Tensor:
        """``compute_logits`` of so many hidden states."""


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer: how many, how many a token is sent to, their width, and the width of those that every
    token is sent to (0: none)."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    first: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()
    correction_bias: bool = False

    def in_layer(self, index: int) -> bool:
        """Whether the layer has experts."""
        return index >= self.first and (index + 1) % self.every == 0 and index not in self.dense_layers


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: widths of the compressed queries (0: they are not) and keys, and of heads."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Shape:
    """The sizes of a model as the engine reads them. ``windows``: of each layer, the tokens it attends to, None for
    all."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    itemsize: int
    linear: LinearMethod
    tied: bool
    windows: tuple[int | None, ...]
    rope_positions: int
    rotary_dim: int
    ropes: tuple[object, ...] = (None,)
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    rope_scaled: bool = False

    def rope_of(self, layer: int) -> object:
        """What tells the rotary tables of layers apart."""
        return self.ropes[layer % len(self.ropes)]
