"""Outputs that CUDA's kernels lay out otherwise than PyTorch's decompositions do. Sources are of PyTorch 2.13.

Where a dimension has one element its stride means nothing to the memory, but it decides whether a tensor counts as
channels_last, and with that the copies of a convolution or an interpolation: pictures in batches of one, or of one
channel. ``TensorIterator`` keeps or renews such strides in another way than the decompositions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import channels_last_order, contiguous_strides, is_dense, iteration_order
from graphmem.capture.operators import Perhaps
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import OpOverload, compute_elementwise_output_strides, suggest_memory_format

_aten = torch.ops.aten

#: A tensor, or a tuple or list of them.
Outputs: TypeAlias = "Tensor | tuple[Tensor, ...]"
#: Of an operator's positional arguments, named arguments, outputs and the version: the outputs, laid out anew.
Relaid = Callable[[Sequence[Any], Mapping[str, Any], "Outputs", versions.Version], "Outputs"]

#: Contiguous, whatever the inputs are: ``dX = empty_like(X, contiguous)`` in layer_norm_kernel.cu, for both norms;
#: outputs without strides (``set_output_raw_strided``) in SoftMax.cpp and of a number's power in Pow.cpp;
#: ``LEGACY_CONTIGUOUS_MEMORY_FORMAT`` in Loss.cpp and RreluWithNoise.cu.
_CONTIGUOUS = {
    _aten.pow.Scalar,
} | {
    getattr(_aten, name).default
    for name in (
        "native_layer_norm_backward", "_fused_rms_norm_backward", "_log_softmax_backward_data", "mse_loss_backward",
        "smooth_l1_loss_backward", "huber_loss_backward", "rrelu_with_noise",
    )
    if hasattr(_aten, name)
}  # fmt: skip
#: Laid out by ``TensorIterator`` for these arguments in this order (Activation.cpp, BinaryOps.cpp), or by
#: ``empty_like`` of one (Loss.cu).
#: The decompositions have other operands first, and the first one with distinct strides decides.
_ITERATED: dict[OpOverload, tuple[int, ...]] = {
    _aten.softplus_backward.default: (0, 1),
    _aten.elu_backward.default: (0, 5),
    _aten.hardtanh_backward.default: (0, 1),
    _aten.hardswish_backward.default: (0, 1),
    _aten.hardsigmoid_backward.default: (0, 1),
    _aten.logit_backward.default: (0, 1),
    _aten.copysign.Tensor: (0, 1),
    _aten.xlogy.Tensor: (0, 1),
    _aten.special_xlog1py.default: (0, 1),
    _aten.floor_divide.default: (0, 1),
    _aten.hardswish.default: (0,),
    _aten.leaky_relu_backward.default: (1, 0),
    _aten.binary_cross_entropy.default: (0,),
    _aten.binary_cross_entropy_backward.default: (1,),
}
#: ``noise.mul(grad)`` in training, otherwise that of ``leaky_relu`` (RreluWithNoise.cu, Activation.cpp).
_RRELU = _aten.rrelu_with_noise_backward.default
#: Laid out as their argument where that is dense, whatever the stride of one element is (``empty_like`` in
#: TensorFactories.cpp).
_LIKE = {
    getattr(_aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "native_dropout")
}
#: Position of the input in the arguments. What is normalized has the format in which the kernel computes
#: (group_norm_kernel.cu, 2.14 and 2.15).
_GROUP_NORMS = {_aten.native_group_norm.default: 0, _aten.native_group_norm_backward.default: 1}
#: Tagged as elementwise, but no iterator lays them out: copies, and one that works in place on a copy.
_NOT_ITERATED = {_aten.clone.default, _aten._to_copy.default, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor}
#: Whose numbers are operands, of no dimension (``wrapped_scalar_tensor`` in BinaryOps.cpp and TensorCompare.cpp).
_NUMBERS_ARE_OPERANDS = {
    getattr(getattr(_aten, name), overload)
    for name in (
        "add", "sub", "mul", "div", "rsub", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and",
        "bitwise_or", "bitwise_xor", "where", "floor_divide",
    )
    for overload in ("default", "Tensor", "Scalar", "Tensor_mode", "Scalar_mode", "ScalarOther", "ScalarSelf")
    if hasattr(getattr(_aten, name), overload)
}  # fmt: skip


def relaid(func: OpOverload) -> Relaid | None:
    """The function that gives the outputs of ``func`` a CUDA build's strides; None where they have them."""
    if func in _CONTIGUOUS:
        return lambda args, kwargs, outputs, _: _made_contiguous(outputs)
    if func in _LIKE:
        return lambda args, kwargs, outputs, _: _made_like(args[0], kwargs.get("memory_format"), outputs)
    if func is _RRELU:
        return lambda args, kwargs, outputs, _: _as_operands(func, args, (2, 0) if args[5] else (1, 0), outputs)
    if func in _ITERATED:
        return lambda args, kwargs, outputs, _: _as_operands(func, args, _ITERATED[func], outputs)
    if func in _GROUP_NORMS:
        return lambda args, kwargs, outputs, version: _group_normed(args[_GROUP_NORMS[func]], outputs, version)
    return partial(_elementwise, func) if _is_elementwise(func) else None


def _is_elementwise(func: OpOverload) -> bool:
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in _NOT_ITERATED:
        return False
    schema = func._schema
    is_tagged = torch.Tag.pointwise in func.tags
    return is_tagged and not schema.is_mutable and [str(value.type) for value in schema.returns] == ["Tensor"]


def _elementwise(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], output: Tensor, _: versions.Version
) -> Tensor:
    if 1 not in output.shape or output.layout != torch.strided or output.device.type != "cuda":
        return output
    return _iterated(func, args, args, output)


def _as_operands(func: OpOverload, args: Sequence[object], positions: Sequence[int], outputs: Outputs) -> Outputs:
    operands = [args[position] for position in positions if position < len(args)]
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if not isinstance(outputs, Tensor) or any(tensor.dim() != outputs.dim() for tensor in tensors):
        return outputs  # a mean or a sum; a number
    if 1 in outputs.shape:
        return _iterated(func, args, operands, outputs)
    return _with_strides(
        outputs, compute_elementwise_output_strides(*(tensor.expand(outputs.shape) for tensor in tensors))
    )


def _with_strides(output: Tensor, strides: tuple[int, ...]) -> Tensor:
    if strides == output.stride():
        return output
    return torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device)


def _made_like(tensor: Tensor, memory_format: torch.memory_format | None, outputs: Outputs) -> Outputs:
    """Outputs of an operator as ``empty_like``, with the strides of ``tensor`` where a card keeps them: it is dense and
    has a dimension of one element, of which the fake kernel takes another stride. Else the outputs as they are."""
    if 1 not in tensor.shape or tensor.layout != torch.strided or tensor.device.type != "cuda":
        return outputs
    if memory_format not in (None, torch.preserve_format) or not is_dense(tensor):
        return outputs
    if isinstance(outputs, tuple):
        return tuple(_with_strides(output, tensor.stride()) for output in outputs)
    return _with_strides(outputs, tensor.stride())


def _iterated(func: OpOverload, args: Sequence[object], operands: Sequence[object], output: Tensor) -> Tensor:
    """The output of an elementwise operator in which a dimension has one element."""
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if not tensors or output.numel() == 0 or output.dim() < 2:
        return output
    has_number = func in _NUMBERS_ARE_OPERANDS and any(isinstance(arg, (int, float, complex)) for arg in args[:3])
    is_fast = not has_number and all(tensor.shape == output.shape for tensor in tensors)
    strides = _fast_strides(tensors) if is_fast else None
    return _with_strides(output, strides or _strides_by_order(output.shape, tensors))


def _fast_strides(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Strides that operands of one shape agree on, or None (``compute_fast_setup_type`` in TensorIterator.cpp)."""
    shape, first = tensors[0].shape, tensors[0].stride()
    if all(tensor.is_contiguous() for tensor in tensors):
        return contiguous_strides(shape)
    if len(shape) == 4 and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors):
        return contiguous_strides(shape, channels_last_order(4))
    if is_dense(tensors[0]) and all(tensor.stride() == first for tensor in tensors):
        return tuple(first)
    return None


def _strides_by_order(shape: Sequence[int], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Dense, the dimensions in the order of the operands' strides (``reorder_dimensions`` in TensorIterator.cpp)."""
    order = iteration_order(shape, [_broadcast_strides(shape, tensor) for tensor in tensors])
    return contiguous_strides(shape, order[::-1])


def _broadcast_strides(shape: Sequence[int], tensor: Tensor) -> list[int]:
    """Of an operand as the iterator sees it: 0 where it is repeated."""
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 and wanted != 1 else stride for size, stride, wanted in own]


def _group_normed(
    tensor: Tensor, outputs: tuple[Tensor | None, ...], version: versions.Version
) -> tuple[Tensor | None, ...]:
    keeps = versions.GROUP_NORM_KEEPS_CHANNELS_LAST.holds(version)
    kept = suggest_memory_format(tensor) if keeps else torch.contiguous_format
    normed, *others = outputs
    if normed is None or normed.is_contiguous(memory_format=kept):
        return outputs
    return type(outputs)((torch.empty_like(normed, memory_format=kept), *others))


def _made_contiguous(outputs: Outputs) -> Outputs:
    """The outputs of an operator, new ones in place of those that are not contiguous."""
    if isinstance(outputs, Tensor):
        is_laid_out = outputs.is_contiguous()
        return outputs if is_laid_out else torch.empty_like(outputs, memory_format=torch.contiguous_format)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_made_contiguous(output) for output in outputs)
    return outputs


# --- views ------------------------------------------------------------------------------------------------------------

_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def patch_views(patches: Patches) -> None:
    """Let fake views go to the C++ kernel.

    Newer versions compute them in Python, to follow sizes that are symbols. That gives dimensions of one element other
    strides than ``computeStride`` (ATen/TensorUtils.cpp) does, and kernels read a memory format off those too: of a
    batch of one image a card may see a contiguous tensor where Python sees a channels_last one.
    """
    patches.wrap(
        "torch._subclasses.fake_impls.op_implementations_dict",
        "views of tensors with dimensions of one element may have other strides than on a card",
        lambda table: {**table, **{view: _left_to_the_kernel for view in _VIEWS if view in table}},
    )


def _left_to_the_kernel(*_: object, **__: object) -> Perhaps:
    return NotImplemented
