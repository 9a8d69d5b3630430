"""Layers of states that a capture found, by their sizes."""

from __future__ import annotations

from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.models.deltanet import DeltaShape, PlainDeltaNet
from graphmem.serving.vllm.models.mamba import ConvolutionShape, Layer, Mixer, ScanShape, ShortConvolution
from graphmem.serving.vllm.run import Run
from graphmem.sources.vllm_layers import StateSizes


def state_of(sizes: StateSizes, conv_bytes: int, state_bytes: int) -> ScanShape | ConvolutionShape | DeltaShape:
    """The state of a captured layer."""
    if sizes.delta:
        return DeltaShape(
            sizes.groups, sizes.heads, sizes.size, sizes.head_dim, sizes.kernel, interleaved=False,
            conv_bytes=conv_bytes, state_bytes=state_bytes,
        )  # fmt: skip
    if not sizes.heads:
        return ConvolutionShape(
            sizes.head_dim, sizes.kernel, sizes.bias, sizes.conv_bias, conv_bytes=conv_bytes, state_bytes=state_bytes
        )  # fmt: skip
    return ScanShape(
        sizes.heads, sizes.head_dim, sizes.groups, sizes.size, sizes.kernel, sizes.chunk, sizes.conv_bias, sizes.bias,
        sizes.normed, sizes.scaled, conv_bytes=conv_bytes, state_bytes=state_bytes,
    )  # fmt: skip


def mixer(run: Run, name: str, shape: Shape) -> Layer:
    """The layer of such a state."""
    if isinstance(shape.state, ConvolutionShape):
        return ShortConvolution(run, name, shape, shape.state)
    if isinstance(shape.state, DeltaShape):
        return PlainDeltaNet(run, name, shape, shape.state)
    assert isinstance(shape.state, ScanShape)
    return Mixer(run, name, shape, shape.state)
