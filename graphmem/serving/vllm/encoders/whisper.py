"""Whisper's encoder: thirty seconds of sound as a spectrogram (vllm 0.32.0, ``model_executor/models/whisper.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphmem.serving.values import count
from graphmem.serving.vllm.encoders import parts
from graphmem.serving.vllm.encoders.budget import Items, Pictured
from graphmem.serving.vllm.layers import LayerNorm
from graphmem.serving.vllm.models.base import Encoder, Tower
from graphmem.serving.vllm.run import Batch, Run, Tensor

#: Both convolutions' width, and the stride of the second.
_KERNEL, _STRIDE = 3, 2
_WIDE = 4


@dataclass(frozen=True)
class Heard(Encoder):
    """``positions``: embeddings of one sound, ``bands``: of its spectrogram, which has twice as many columns."""

    items: Items
    widths: parts.Widths
    depth: int
    positions: int
    bands: int

    def tower(self, run: Run, batch: Batch) -> Tower:
        return _Tower(run, self)


def tokens_of(asked: Pictured, limits: Mapping[str, int]) -> dict[str, int]:
    """Embeddings of a sound."""
    return {"audio": count(asked.vision, "max_source_positions", 1500)}


def encoder(asked: Pictured, items: Items, itemsize: int) -> Heard:
    """The encoder that the configuration describes."""
    own = asked.vision
    hidden, inner, heads = (count(own, name) for name in ("d_model", "encoder_ffn_dim", "encoder_attention_heads"))
    return Heard(
        items, parts.Widths(hidden, inner, heads, itemsize), count(own, "encoder_layers"), items.tokens,
        count(own, "num_mel_bins", 80),
    )  # fmt: skip


class _Block(parts.SummedBlock):
    def __init__(self, run: Run, name: str, widths: parts.Widths) -> None:
        self.run = run
        self.attention = parts.Attention(run, f"{name}.self_attn", widths, named=("qkv_proj", "out_proj"))
        self.norms = [LayerNorm(run, f"{name}.self_attn_layer_norm", widths.hidden, widths.itemsize)]
        self.mlp = parts.feed_forward(run, f"{name}.mlp", widths)
        self.norms.append(LayerNorm(run, f"{name}.final_layer_norm", widths.hidden, widths.itemsize))


class _Tower(Tower):
    """``WhisperEncoder``."""

    def __init__(self, run: Run, shape: Heard) -> None:
        self.run, self.shape = run, shape
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        for name, channels in (("conv1", shape.bands), ("conv2", hidden)):
            run.new(hidden * channels * _KERNEL * size, f"encoder.{name}.weight")
            run.new(hidden * size, f"encoder.{name}.bias")
        self.blocks = [_Block(run, f"encoder.layers.{index}", shape.widths) for index in range(shape.depth)]
        self.norm = LayerNorm(run, "encoder.layer_norm", hidden, size)
        run.new(shape.positions * hidden * size, "encoder.embed_positions.weight")
        half = shape.positions * hidden // 2 * _WIDE  # ``sinusoids``
        run.temporary(half, half, half, 2 * half)

    def inputs(self) -> Tensor:
        """Spectrograms in fp32."""
        self.run.enter("encoder")
        return self.run.new(self.shape.items.count * self._spectrogram * _WIDE, "spectrograms")

    @property
    def _spectrogram(self) -> int:
        return self.shape.bands * self.shape.positions * _STRIDE

    def encode(self) -> list[Tensor]:
        run, shape, count = self.run, self.shape, self.shape.items.count
        size = shape.widths.itemsize
        narrow = [run.new(self._spectrogram * count * size, "spectrograms in 16 bits")]
        width = shape.positions * shape.widths.hidden * size
        run.enter("encoder.conv1")
        each = [self._convolved(width) for _ in range(count)]
        hidden = run.replacing(*each[:-1], run.new(width * count, "sounds"))
        rows = shape.positions * count
        sequences = parts.Sequences(rows, count, shape.positions, known=False)
        hidden = parts.through(run, self.blocks, hidden, sequences, keeps_first=False)
        return [run.replacing(hidden, *each[-1:], *narrow, self.norm(rows))]

    def _convolved(self, width: int) -> Tensor:
        """One sound: two convolutions, each activated, and positions."""
        run = self.run
        first = run.replacing(run.new(_STRIDE * width), run.new(_STRIDE * width))
        second = run.replacing(first, run.new(width))
        return run.replacing(run.replacing(second, run.new(width)), run.new(width))
