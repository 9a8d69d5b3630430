"""Parts of encoders: norms, attention, feed-forward layers, in the order in which they allocate.

Followed from vllm 0.32.0, ``model_executor/layers`` and, of attention, ``layers/attention/mm_encoder_attention.py`` and
``v1/attention/ops/vit_attn_wrappers.py``: FlashAttention with variable lengths on every card that has it. Encoders run
as they are written, compiled or not (``compile_mm_encoder`` is off). A tensor lives as long as a name of the engine's
Python holds it. Sizes are bytes of one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from graphmem.errors import UsageError
from graphmem.serving.vllm.attention import FlashAttention3
from graphmem.serving.vllm.layers import LayerNorm, Linear, Unquantized, cdiv, root_mean_square
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.units import MIB

#: Sequences whose schedule FlashAttention 3 lays out together (hopper/flash_api.cpp: rounded up to 4).
_SCHEDULED = 4
#: The widest head that FlashAttention 2 and 3 take (hopper/flash_api.cpp, csrc/flash_attn/flash_api.cpp).
_WIDEST_HEAD = 256
#: Rows and columns of its tiles by the widest head that they are for (hopper/tile_size.h, ``tile_size_fwd_sm90``,
#: neither causal nor local, in 16 bits).
_TILES = {64: (192, 192), 96: (192, 144), 128: (128, 176), 192: (128, 112), 256: (128, 80)}
#: Sequences up to which parts are found on the card, so that a bound for one sequence is enough; the most parts; the
#: second-level cache that is reckoned with.
_DYNAMIC, _MOST_SPLITS, _CACHE = 992, 128, 50 * MIB


@dataclass(frozen=True)
class Widths:
    """Of a transformer: hidden states, the feed-forward layer, heads, and bytes of an element. Raises
    :class:`UsageError` for heads that attention does not take."""

    hidden: int
    inner: int
    heads: int
    itemsize: int
    #: Whether there is no attention.
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.whole and (self.hidden % self.heads or self.head_dim > _WIDEST_HEAD):
            raise UsageError(
                f"the encoder's {self.heads} heads of {self.hidden} channels are not followed: FlashAttention takes "
                f"heads of one width, up to {_WIDEST_HEAD}"
            )

    @property
    def head_dim(self) -> int:
        """Of one head."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class Sequences:
    """Sequences that each attend to themselves: ``count`` of them, of ``rows`` in all, the longest of ``longest``;
    ``known``: their lengths are on the card."""

    rows: int
    count: int
    longest: int
    known: bool = True


class RMSNorm:
    """``RMSNorm``, by its kernel, or as torch operators (vllm/ir/ops/layernorm.py)."""

    def __init__(self, run: Run, name: str, width: int, itemsize: int) -> None:
        self.run, self.name, self.width, self.itemsize = run, name, width, itemsize
        run.new(width * itemsize, f"{name}.weight")

    def __call__(self, rows: int) -> Tensor:
        """Normed, as a new tensor."""
        run, size = self.run, rows * self.width * self.itemsize
        run.enter(self.name)
        if not run.native:
            return run.new(size, "normed")
        return self._native(rows, run.new(rows * self.width * 4))

    def added(self, rows: int) -> list[Tensor]:
        """(normed, sum): new tensors, or none where the kernel writes in place."""
        run = self.run
        run.enter(self.name)
        if not run.native:
            return []
        wide = rows * self.width * 4
        terms = [run.new(wide) for _ in range(2)]
        total = run.replacing(*reversed(terms), run.new(wide))
        result = run.new(rows * self.width * self.itemsize, "residual")
        return [self._native(rows, total), result]

    def _native(self, rows: int, wide: Tensor) -> Tensor:
        """From the states in fp32: squares, their mean, its inverse root, two products, back to the model's type."""
        run, size = self.run, rows * self.width * self.itemsize
        mean, scaled = root_mean_square(run, rows, wide.bytes)
        return run.replacing(run.new(size), scaled, mean, wide, run.new(size, "normed"))


def quick_gelu(run: Run, size: int) -> Tensor:
    """``QuickGELU``, by its kernel, or as torch operators: a product and its sigmoid before the result."""
    if not run.native:
        return run.new(size, "activated")
    sigmoid = run.replacing(run.new(size), run.new(size))
    return run.replacing(sigmoid, run.new(size, "activated"))


def linear(
    run: Run, name: str, inputs: int, outputs: list[int], itemsize: int, *, bias: bool = True, reduce: bool = False
) -> Linear:
    """A layer of an encoder; sizes are this rank's."""
    method = run.encoder_linear or Unquantized(itemsize)
    made = Linear(run, name, inputs, outputs, method, itemsize, bias=bias, reduce=reduce)
    run.encoder_layers.append(made)
    return made


def shared(run: Run, what: str, size: int) -> int:
    """One rank's share. Raises :class:`UsageError` where ranks do not divide it."""
    if size % run.tp:
        raise UsageError(f"the encoder's {what} ({size}) are not divisible by tensor parallel size ({run.tp})")
    return size // run.tp


def _splits(run: Run, sequences: Sequences, heads: int, head_dim: int) -> int:
    """Parts that FlashAttention 3 cuts keys into, whose results in fp32 are put together: where one sequence alone has
    too few blocks of queries for the card, the fewest that fill its waves nearly as well as can be; and where a head's
    keys and values are more than the cache (vllm-flash-attention, hopper/heuristics.h, ``num_splits_heuristic``)."""
    if run.device.limits.vllm_attention != FlashAttention3.name:
        return 1
    length, multiprocessors = sequences.longest, run.device.sm_count
    down, across = next(tile for most, tile in _TILES.items() if head_dim <= most)
    rows, columns = cdiv(length, down), cdiv(length, across)
    blocks = (1 if sequences.count <= _DYNAMIC else sequences.count) * heads * rows
    if blocks >= 0.8 * multiprocessors:
        size = length * 2 * head_dim * 2
        return min(cdiv(size, _CACHE), _MOST_SPLITS) if size > _CACHE and rows >= 2 * multiprocessors else 1
    if columns <= 4:
        return 1
    filled = []
    for splits in range(1, min(_MOST_SPLITS, multiprocessors, columns) + 1):
        waves = blocks * splits / multiprocessors
        filled.append(waves / ceil(waves))
    return next(index for index, one in enumerate(filled, start=1) if one >= 0.85 * max(filled))


def attended(run: Run, sequences: Sequences, heads: int, widths: Widths) -> Tensor:
    """``MMEncoderAttention`` of so many heads on this rank."""
    rows, ends = sequences.rows, (sequences.count + 1) * 4
    lengths = [] if sequences.known else [run.new(ends, "ends of sequences")]
    result = run.new(rows * heads * widths.head_dim * widths.itemsize, "attended")
    sums = heads * rows * 4
    splits = _splits(run, sequences, heads, widths.head_dim)
    vectors = 2 if splits > 1 else 1  # of every sequence: its blocks, and its parts
    schedule = (1 + cdiv(sequences.count, _SCHEDULED) * _SCHEDULED * vectors) * 4
    parts = [splits * sums * widths.head_dim, splits * sums] if splits > 1 else []
    run.temporary(ends, sums, schedule, *parts)
    run.free(*lengths)
    return result


class Attention:
    """Queries, keys and values in one product, attention within every sequence, and its projection."""

    def __init__(self, run: Run, name: str, widths: Widths, *, bias: bool = True, named: tuple[str, str]) -> None:
        self.run, self.name, self.widths = run, name, widths
        self.heads = shared(run, "heads", widths.heads)
        self.width = self.heads * widths.head_dim
        size = widths.itemsize
        self.qkv = linear(run, f"{name}.{named[0]}", widths.hidden, [self.width] * 3, size, bias=bias)
        self.proj = linear(run, f"{name}.{named[1]}", self.width, [widths.hidden], size, bias=bias, reduce=True)

    def __call__(self, sequences: Sequences) -> Tensor:
        """The projected output; the input is the caller's."""
        qkv = self.qkv(sequences.rows)
        self.run.enter(self.name)
        held = self.rotated(sequences.rows)
        output = attended(self.run, sequences, self.heads, self.widths)
        return self.run.replacing(output, *reversed(held), qkv, self.proj(sequences.rows))

    def rotated(self, rows: int) -> list[Tensor]:
        """Queries and keys as they are rotated, which stay until the layer returns."""
        return []


class HalvesTogether(Attention):
    """Queries and keys are put together and rotated by one kernel (Qwen)."""

    def rotated(self, rows: int) -> list[Tensor]:
        both = 2 * rows * self.width * self.widths.itemsize
        return [self.run.new(both, "queries and keys"), self.run.new(both, "rotated queries and keys")]


class FeedForward:
    """Two layers ``named`` so, shared out by their ``inner`` channels (``what`` these are, for people). The activation
    between them is torch's own but for ``quick``: QuickGELU."""

    def __init__(
        self, run: Run, named: tuple[str, str], inputs: int, inner: int, outputs: int, itemsize: int, *,
        what: str = "intermediate channels", bias: bool = True, quick: bool = False,
    ) -> None:  # fmt: skip
        self.run, self.quick, own = run, quick, shared(run, what, inner)
        self.first = linear(run, named[0], inputs, [own], itemsize, bias=bias)
        self.second = linear(run, named[1], own, [outputs], itemsize, bias=bias, reduce=True)

    def __call__(self, rows: int) -> Tensor:
        """The output; the input is the caller's."""
        run, inner = self.run, self.first(rows)
        acted = quick_gelu(run, inner.bytes) if self.quick else run.new(inner.bytes, "activated")
        run.free(inner)
        return run.replacing(acted, self.second(rows))


def feed_forward(run: Run, name: str, widths: Widths, layers: str = "fc", *, quick: bool = False) -> FeedForward:
    """That of a layer of the encoder."""
    named = f"{name}.{layers}1", f"{name}.{layers}2"
    return FeedForward(run, named, widths.hidden, widths.inner, widths.hidden, widths.itemsize, quick=quick)


class GatedFeedForward:
    """Gate and up in one product, which is held until the layer returns where it ``holds`` a name for it."""

    def __init__(self, run: Run, name: str, widths: Widths, *, bias: bool, holds: bool = True) -> None:
        self.run, self.name, self.size, self.holds = run, name, widths.itemsize, holds
        self.inner = shared(run, "intermediate channels", widths.inner)
        self.gate_up = linear(run, f"{name}.gate_up_proj", widths.hidden, [self.inner] * 2, self.size, bias=bias)
        self.down = linear(run, f"{name}.down_proj", self.inner, [widths.hidden], self.size, bias=bias, reduce=True)

    def __call__(self, rows: int, given: Tensor | None = None) -> Tensor:
        """The output. ``given``: the input, where the layer's name for it is the only one."""
        both = self.gate_up(rows)
        acted = self.run.new(rows * self.inner * self.size, "activated")
        if given is not None:
            self.run.free(given)
        if not self.holds:
            self.run.free(both)
        return self.run.replacing(acted, *[both] * self.holds, self.down(rows))


class Block(ABC):
    """A layer of an encoder."""

    @abstractmethod
    def __call__(self, sequences: Sequences) -> Tensor:
        """The hidden states after it, as a new tensor; the input is the caller's."""


class SummedBlock(Block):
    """Attention and a feed-forward layer, each of normed states, each added."""

    run: Run
    norms: list[LayerNorm]
    attention: Callable[[Sequences], Tensor]
    mlp: FeedForward

    def __call__(self, sequences: Sequences) -> Tensor:
        run, rows = self.run, sequences.rows
        middle = self.added(run.replacing(self.norms[0](rows), self.attention(sequences)))
        result = self.added(run.replacing(self.norms[1](rows), self.mlp(rows)))
        return run.replacing(middle, result)

    def added(self, output: Tensor) -> Tensor:
        """The sum of this output and what went in, as a new tensor; the output is let go."""
        return self.run.replacing(output, self.run.new(output.bytes, "added"))


def through(run: Run, blocks: Iterable[Block], hidden: Tensor, sequences: Sequences, *, keeps_first: bool) -> Tensor:
    """Hidden states after all layers. ``keeps_first``: the first one's input is held by somebody else."""
    for number, block in enumerate(blocks):
        after = block(sequences)
        hidden = after if keeps_first and not number else run.replacing(hidden, after)
    return hidden
