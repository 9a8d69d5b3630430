"""Pooling, interpolation, padding and rearranging of images: copies, and outputs with larger storages than they need.

Sources: ATen/native/cuda/DilatedMaxPool{2,3}d.cu, AveragePool{2,3}d.cu, AdaptiveMaxPooling2d.cu, UpSampleBicubic2d.cu,
UpSampleNearest3d.cu, UpSampleTrilinear3d.cu, ReflectionPad.cu, Im2Col.cu, Col2Im.cu, TensorTransformations.cu and
ATen/native/AffineGridGenerator.cpp of PyTorch 2.13; orders observed on its CUDA build.
"""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.conv_backend import View
from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, rule


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Dense in a channels_last format that ``suggest_memory_format`` names as well."""
    if tensor.dim() not in (4, 5):
        return False
    view = View.of(tensor)
    return view.suggests_channels_last() and view.is_dense(channels_last=True)


def _is_dense_as(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Dense in the memory format that ``like`` suggests."""
    return View.of(tensor).is_dense(View.of(like).suggests_channels_last())


def _copies(script: Script, *tensors: torch.Tensor) -> None:
    """Contiguous copies of the tensors that are not, held together until the operator ends."""
    tokens = [token for tensor in tensors for token in script.contiguous(tensor, "contiguous copy")]
    script.give(*reversed(tokens))


# --- kernels that want their first input dense ------------------------------------------------------------------------


@rule(
    "aten.avg_pool2d.default",
    "aten.upsample_nearest2d.default",
    "aten._upsample_nearest_exact2d.default",
    "aten.upsample_nearest2d_backward.default",
    "aten._upsample_nearest_exact2d_backward.default",
    "aten.upsample_bilinear2d_backward.default",
    "aten._upsample_bilinear2d_aa.default",
    "aten._upsample_bicubic2d_aa.default",
)
def dense_input_rule(call: Call) -> Script | None:
    """In its own memory format (AveragePool2d.cu, UpSampleNearest2d.cu, UpSampleBi{linear,cubic}2d.cu)."""
    script = Script().output(0)
    if not _is_channels_last(call.all_tensors[0]):
        _copies(script, call.all_tensors[0])
    return script


#: Channels from which ``upsample_bilinear2d`` has a kernel for channels_last tensors (UpSampleBilinear2d.cu).
_CHANNELS_LAST_FROM = 4


@rule("aten.upsample_bilinear2d.default")
def upsample_bilinear2d_rule(call: Call) -> Script | None:
    """Strides with gaps that suggest channels_last, as of tokens behind a class token, are packed for its kernel; the
    other kernel reads any strides."""
    tensor = call.self
    view = View.of(tensor)
    if tensor.shape[1] < _CHANNELS_LAST_FROM or not view.suggests_channels_last() or view.is_dense(channels_last=True):
        return None
    script = Script().output(0)
    script.give(script.take(bytes_of(tensor), "packed channels_last copy"))
    return script


@rule(
    "aten._upsample_bilinear2d_aa_backward.default",
    "aten._upsample_bicubic2d_aa_backward.default",
    "aten.upsample_bicubic2d_backward.default",
    "aten.upsample_nearest1d.default",
    "aten._upsample_nearest_exact1d.default",
    "aten.upsample_nearest1d_backward.default",
    "aten._upsample_nearest_exact1d_backward.default",
    "aten.upsample_linear1d_backward.default",
    "aten.upsample_nearest3d_backward.default",
    "aten._upsample_nearest_exact3d_backward.default",
    "aten.avg_pool3d.default",
    "aten.avg_pool3d_backward.default",
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
)
def contiguous_input_rule(call: Call) -> Script | None:
    """In contiguous format, whatever its own (the ``contiguous()`` at the head of each kernel's launcher)."""
    script = Script().output(0)
    _copies(script, call.all_tensors[0])
    return script


# --- pooling ----------------------------------------------------------------------------------------------------------


@rule("aten.max_pool2d_with_indices.default")
def max_pool2d_rule(call: Call) -> Script | None:
    script = Script().output(0).output(1)
    if not _is_channels_last(call.self):
        _copies(script, call.self)
    return script


@rule("aten._adaptive_avg_pool2d.default")
def adaptive_avg_pool2d_rule(call: Call) -> Script | None:
    """A contiguous copy of the input comes before the output, but the kernel for channels_last tensors reads any
    strides (AdaptiveAveragePooling.cu)."""
    script = Script()
    reads = View.of(call.self).suggests_channels_last() or call.self.is_contiguous()
    token = [] if reads else [script.take(bytes_of(call.self), "contiguous copy")]
    script.output(0)
    script.give(*token)
    return script


@rule("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward_rule(call: Call) -> Script | None:
    """The gradient becomes contiguous, but the kernel for channels_last inputs reads any strides of it."""
    script = Script().output(0)
    if not View.of(call.self).suggests_channels_last():
        _copies(script, call.grad_output)
    return script


@rule("aten.avg_pool2d_backward.default", "aten.max_pool2d_with_indices_backward.default")
def pool2d_backward_rule(call: Call) -> Script | None:
    """Input, then gradient, are brought to the input's memory format (AveragePool2d.cu, DilatedMaxPool2d.cu)."""
    script = Script().output(0)
    grad, tensor = call.grad_output, call.self
    tokens = [] if _is_dense_as(tensor, tensor) else [script.take(bytes_of(tensor), "dense input")]
    if not _is_dense_as(grad, tensor):
        tokens.append(script.take(bytes_of(grad), "dense gradient"))
    script.give(*reversed(tokens))
    return script


@rule("aten.max_pool3d_with_indices.default")
def max_pool3d_rule(call: Call) -> Script | None:
    """The input is brought to its own memory format (DilatedMaxPool3d.cu)."""
    script = Script().output(0).output(1)
    if not _is_dense_as(call.self, call.self):
        script.give(script.take(bytes_of(call.self), "dense input"))
    return script


@rule("aten.max_pool3d_with_indices_backward.default")
def max_pool3d_backward_rule(call: Call) -> Script | None:
    """The gradient is brought to the input's memory format; values of the input are not needed."""
    script = Script().output(0)
    if not _is_dense_as(call.grad_output, call.self):
        script.give(script.take(bytes_of(call.grad_output), "dense gradient"))
    return script


@rule("aten.adaptive_max_pool2d.default")
def adaptive_max_pool2d_rule(call: Call) -> Script | None:
    """The kernel writes contiguous results, which are copied to where they belong."""
    script = Script().output(0).output(1)
    _copies(script, call.outputs[0], call.outputs[1], call.self)
    return script


@rule("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_pool2d_backward_rule(call: Call) -> Script | None:
    script = Script().output(0)
    _copies(script, call.grad_output, call.indices, call.outputs[0])
    return script


# --- interpolation ----------------------------------------------------------------------------------------------------


@rule("aten.upsample_nearest3d.default", "aten._upsample_nearest_exact3d.default")
def upsample_nearest3d_rule(call: Call) -> Script | None:
    script = Script().output(0)
    _copies(script, call.outputs[0], call.self)
    return script


@rule("aten.upsample_trilinear3d_backward.default")
def upsample_trilinear3d_backward_rule(call: Call) -> Script | None:
    script = Script().output(0)
    _copies(script, call.grad_output, call.outputs[0])
    return script


# --- padding and rolling ----------------------------------------------------------------------------------------------


@rule("aten.roll.default")
def roll_rule(call: Call) -> Script | None:
    """One dimension after the other; every intermediate but the first copy lives until the end."""
    dims = call.dims
    if not dims or call.self.numel() == 0:
        return None
    script = Script()
    copy = script.contiguous(call.self, "contiguous input")
    tokens = []
    for _ in dims[1:]:
        tokens.append(script.take(bytes_of(call.self), "rolled along one dimension"))
        script.give(*copy)
        copy = []
    script.output(0)
    script.give(*copy, *reversed(tokens))
    return script


# --- columns ----------------------------------------------------------------------------------------------------------


def _resized_like_input(tensor: torch.Tensor, output: torch.Tensor) -> Script:
    """The output starts as ``empty_like(input)`` and is resized: a smaller one keeps the input's bytes."""
    script = Script()
    copies = script.contiguous(tensor, "contiguous input")
    if bytes_of(output) <= bytes_of(tensor):
        script.output(0, bytes_of(tensor))
    else:
        first = script.take(bytes_of(tensor), "output before it is resized")
        script.output(0)
        script.give(first)
    script.give(*copies)
    return script


@rule("aten.im2col.default", "aten.col2im.default")
def columns_rule(call: Call) -> Script | None:
    return _resized_like_input(call.self, call.outputs[0])


# --- sampling ---------------------------------------------------------------------------------------------------------


@rule("aten.affine_grid_generator.default")
def affine_grid_rule(call: Call) -> Script | None:
    """Homogeneous coordinates of every point, filled from one range a dimension; unaligned ranges are scaled twice."""
    theta, size = call.theta, [int(n) for n in call.size]
    aligned = call.align_corners
    element, spatial = theta.element_size(), size[2:]
    points = size[0]
    for n in spatial:
        points *= n
    script = Script()
    grid = script.take(points * (len(spatial) + 1) * element, "homogeneous coordinates")
    for n in reversed(spatial):
        ranges = [script.take(n * element, "range of coordinates") for _ in range(1 if aligned else 3)]
        script.give(*reversed(ranges))
    script.output(0)
    script.product()  # by theta (ATen/native/AffineGridGenerator.cpp)
    script.give(grid)
    return script
