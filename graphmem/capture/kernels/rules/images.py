"""Rearranging and sampling of images: outputs with larger storages than they need, intermediates.

Sources: Im2Col.cu, Col2Im.cu, TensorTransformations.cu of ATen/native/cuda and ATen/native/AffineGridGenerator.cpp of
PyTorch 2.13; orders observed on its CUDA build.
"""

from __future__ import annotations

import math

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule


@recorded_rule("aten.roll.default")
def roll_rule(call: Call) -> Script | None:
    """One dimension after the other; every intermediate but the first copy lives until the end."""
    if not call.dims or call.self.numel() == 0:
        return None
    script = Script()
    copy = script.contiguous(call.self, "contiguous input")
    tokens = []
    for _ in call.dims[1:]:
        tokens.append(script.take(bytes_of(call.self), "rolled along one dimension"))
        script.give(*copy)
        copy = []
    return script.output(0).give(*copy, *reversed(tokens))


@recorded_rule("aten.im2col.default", "aten.col2im.default")
def columns_rule(call: Call) -> Script:
    """The output starts as ``empty_like(input)`` and is resized: a smaller one keeps the input's bytes."""
    size = bytes_of(call.self)
    script = Script()
    copies = script.contiguous(call.self, "contiguous input")
    if bytes_of(call.outputs[0]) <= size:
        script.output(0, size)
    else:
        first = script.take(size, "output before it is resized")
        script.output(0).give(first)
    return script.give(*copies)


@recorded_rule("aten.affine_grid_generator.default")
def affine_grid_rule(call: Call) -> Script:
    """Homogeneous coordinates of every point, filled from one range a dimension; unaligned ranges are scaled twice."""
    batch, _, *spatial = (int(size) for size in call.size)
    element = call.theta.element_size()
    script = Script()
    grid = script.take(batch * math.prod(spatial) * (len(spatial) + 1) * element, "homogeneous coordinates")
    for size in reversed(spatial):
        copies = range(1 if call.align_corners else 3)
        ranges = [script.take(size * element, "range of coordinates") for _ in copies]
        script.give(*reversed(ranges))
    return script.output(0).product().give(grid)  # the product by theta
