"""Kernels that take nothing but copies of operands that do not lie as they read them, or make outputs in another order.

Sources of PyTorch 2.13: ``ATen/native/cuda`` AveragePool{2,3}d.cu, AdaptiveMaxPooling2d.cu, DilatedMaxPool{2,3}d.cu,
Dropout.cu, EmbeddingBag.cu, Loss.cu, ReflectionPad.cu, RNN.cu, SoftMax.cu, UpSample*.cu; ``native/cudnn/LossCTC.cpp``;
of torchvision 0.28 ``csrc/ops/cuda/roi_{align,pool}_kernel.cu`` and ``ps_roi_{align,pool}_kernel.cu``. Orders observed
on their CUDA builds.
"""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.conv_backend import View
from graphmem.capture.kernels.parts.known import read_table
from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule

_LABELS = {
    "self": "input",
    "input": "input",
    "grad_output": "gradient",
    "rois": "regions",
    "outputs": "result",
    "weight": "weights",
}
#: ``operands.json``, by operator. ``contiguous``: operands that are copied where they are not contiguous, in order,
#: after the outputs are made and until the operator ends; ``outputs`` are results that the kernel writes contiguously,
#: and that are copied where they belong. ``either_format``: the operand that is copied unless it is contiguous or
#: channels_last; ``not_if_same_size``: those of them that resize by ``copy_``, which reads any strides, where the size
#: stays (observed on 2.13). ``format_of_input``: operands that are copied unless they are dense in the memory format
#: that ``self`` suggests. ``order``: that in which the outputs are made: the mask of dropout before its output, of bags
#: the sizes and the bag of every index before the result.
_TABLE = read_table("operands.json")
_CONTIGUOUS, _EITHER_FORMAT = _TABLE["contiguous"], _TABLE["either_format"]
_FORMAT_OF_INPUT, _ORDER, _NOT_IF_SAME_SIZE = _TABLE["format_of_input"], _TABLE["order"], _TABLE["not_if_same_size"]


def _copies(script: Script, *operands: tuple[str, torch.Tensor]) -> Script:
    """Contiguous copies of the tensors, each under a name, that are not; held together until the operator ends."""
    tokens = [
        token
        for name, tensor in operands
        for token in script.contiguous(tensor, f"contiguous {_LABELS.get(name, name)}")
    ]
    return script.give(*reversed(tokens))


def _given(call: Call, *names: str) -> list[tuple[str, torch.Tensor]]:
    """The operands of these names that the call has, ``outputs`` being its results."""
    operands = []
    for name in names:
        tensors = call.outputs if name == "outputs" else [call.get(name)]
        operands += [(name, tensor) for tensor in tensors if tensor is not None]
    return operands


@recorded_rule(*(name for name in _CONTIGUOUS if name.startswith("aten.")))
@recorded_rule(*(name for name in _CONTIGUOUS if name.startswith("torchvision.")), library="torchvision")
def contiguous_operands_rule(call: Call) -> Script:
    """The ``contiguous()`` at the head of a kernel's launcher, whatever the operand's own memory format is."""
    return _copies(Script.of(call), *_given(call, *_CONTIGUOUS[call.operator]))


@recorded_rule(*_EITHER_FORMAT)
def either_format_rule(call: Call) -> Script:
    """There is a kernel for each of two formats; an input of neither is made contiguous."""
    name = _EITHER_FORMAT[call.operator]
    tensor = call.get(name)
    view = View.of(tensor)
    if call.operator in _NOT_IF_SAME_SIZE and call.outputs[0].shape == tensor.shape:
        return Script.of(call)
    if tensor.dim() in (4, 5) and view.suggests_channels_last() and view.is_dense(channels_last=True):
        return Script.of(call)
    return _copies(Script.of(call), (name, tensor))


@recorded_rule(*_FORMAT_OF_INPUT)
def format_of_input_rule(call: Call) -> Script:
    """Input, then gradient, in the input's memory format."""
    script, channels_last = Script.of(call), View.of(call.self).suggests_channels_last()
    tensors = [(name, call.get(name)) for name in _FORMAT_OF_INPUT[call.operator]]
    tokens = [
        script.take(bytes_of(tensor), f"dense {_LABELS[name]}")
        for name, tensor in tensors
        if not View.of(tensor).is_dense(channels_last)
    ]
    return script.give(*reversed(tokens))


@recorded_rule(*_ORDER)
def order_rule(call: Call) -> Script:
    """Nothing but the outputs, in another order than they are returned in."""
    return Script().outputs(*_ORDER[call.operator])


@recorded_rule("aten._adaptive_avg_pool2d.default")
def adaptive_avg_pool2d_rule(call: Call) -> Script:
    """A contiguous copy of the input comes before the output, but the kernel for channels_last tensors reads any
    strides (AdaptiveAveragePooling.cu)."""
    script = Script()
    reads = View.of(call.self).suggests_channels_last()
    copies = [] if reads else script.contiguous(call.self, "contiguous input")
    return script.output(0).give(*copies)


@recorded_rule("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward_rule(call: Call) -> Script | None:
    """The kernel for channels_last inputs reads any strides of the gradient."""
    if View.of(call.self).suggests_channels_last():
        return None
    return _copies(Script.of(call), ("grad_output", call.grad_output))


@recorded_rule("aten.nll_loss2d_forward.default", "aten.nll_loss2d_backward.default")
def nll_loss2d_rule(call: Call) -> Script:
    """Without a reduction the kernel reads any strides but those of the weights of classes, and makes the sum of the
    weights first (NLLLoss2d.cu)."""
    is_forward = call.operator.startswith("aten.nll_loss2d_forward")
    if call.reduction == 0:
        return _copies(Script().outputs(1, 0) if is_forward else Script.of(call), *_given(call, "weight"))
    names = ("self", "weight", "target") if is_forward else ("target", "weight")
    return _copies(Script.of(call), *_given(call, *names))


@recorded_rule("aten.rrelu_with_noise.default")
def rrelu_rule(call: Call) -> Script | None:
    """In training the kernel takes contiguous values (``_rrelu_with_noise_cuda_train``, RreluWithNoise.cu)."""
    return _copies(Script.of(call), ("self", call.self)) if call.training else None


#: Channels from which ``upsample_bilinear2d`` has a kernel for channels_last tensors (UpSampleBilinear2d.cu).
_CHANNELS_LAST_FROM = 4


@recorded_rule("aten.upsample_bilinear2d.default")
def upsample_bilinear2d_rule(call: Call) -> Script | None:
    """Strides with gaps that suggest channels_last, as of tokens behind a class token, are packed for its kernel; the
    other kernel reads any strides."""
    tensor = call.self
    view = View.of(tensor)
    if tensor.shape[1] < _CHANNELS_LAST_FROM or not view.suggests_channels_last() or view.is_dense(channels_last=True):
        return None
    return Script().output(0).scratch(bytes_of(tensor), "packed channels_last copy")
