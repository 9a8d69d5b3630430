"""Buffers of normalizations: layer, RMS, group and batch norm, forward and backward.

CUDA keeps statistics of half types in fp32, whatever a fake operator gives, so the sizes of the outputs are set here.
Sources are named at each rule; "observed" means recorded from the allocator of the real 2.13.0 CUDA build.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphmem.base import versions
from graphmem.base.numbers import last_pow2
from graphmem.capture.kernels.parts.conv_backend import View
from graphmem.capture.kernels.parts.layout import HALF_TYPES, Layout, Strided, bytes_of
from graphmem.capture.kernels.parts.reduction import Kernel, reduction_buffers, write_sum
from graphmem.capture.kernels.parts.script import Call, Card, Gradients, Script, recorded_rule
from graphmem.capture.torch_internals import suggest_memory_format


def _accumulate_bytes(tensor: torch.Tensor) -> int:
    """Size of acc_type<scalar_t, cuda> (ATen/AccumulateType.h)."""
    return 8 if tensor.dtype == torch.float64 else 4


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in HALF_TYPES


# --- layer norm and RMS norm (aten/src/ATen/native/cuda/layer_norm_kernel.cu) -----------------------------------------


@recorded_rule("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
def layer_norm_rule(call: Call) -> Script:
    """The output, then a statistic or two of every row in the type that is accumulated in."""
    script = Script()
    copies = script.contiguous(call.input, "contiguous input")
    script.output(0)
    for index, statistics in enumerate(call.outputs[1:], 1):
        script.output(index, statistics.numel() * _accumulate_bytes(call.input))
    return script.give(*copies)


@recorded_rule("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default")
def layer_norm_backward_rule(call: Call) -> Script | None:
    tensor, weight, script = call.input, call.weight, Script()
    gradients = Gradients(script, call.output_mask)
    copies = script.contiguous(tensor, "contiguous input")
    gradients.emit(0, 1, 2)
    copies += script.contiguous(call.grad_out, "contiguous gradient")
    wanted = [index for index in (1, 2) if index in gradients]
    if weight is not None and wanted:
        _tall_parameter_gradients(script, tensor.numel() // weight.numel(), weight, wanted, call.card)
    return script.give(*reversed(copies))


def _tall_parameter_gradients(
    script: Script, rows: int, weight: torch.Tensor, wanted: Sequence[int], card: Card
) -> None:
    """Many rows of few columns: the rows are summed in pieces first, which leave partial sums in the weight's type."""
    columns = weight.numel()
    if not (rows > 64 * 1024 and columns // 32 < card.sm_count // 2):
        return
    pieces = min(32 * 1024 // -(-columns // 32), -(-rows // 32))
    partial = Layout((pieces, columns))
    parts = [script.take(partial.numel() * weight.element_size(), "partial parameter gradient") for _ in wanted]
    for _ in wanted:
        total = script.take(bytes_of(weight), "parameter gradient")
        write_sum(script, partial, [0], weight.dtype, card)
        script.give(total)
    script.give(*reversed(parts))


# --- group norm (aten/src/ATen/native/cuda/group_norm_kernel.cu) ------------------------------------------------------


@recorded_rule("aten.native_group_norm.default")
def group_norm_rule(call: Call) -> Script | None:
    tensor, batch, channels, groups = call.input, call.N, call.C, call.group
    script = Script()
    stats = batch * groups * tensor.element_size()
    script.output(0).output(1, stats).output(2, stats)
    copies = []
    if not tensor.is_contiguous(memory_format=_format_of_group_norm(call)):
        copies = [script.take(bytes_of(tensor), "contiguous input")]
    taken = []
    if _is_half(tensor) and versions.GROUP_NORM_IN_FP32.holds(call.card.torch_version):
        taken += [script.take(batch * groups * 4, f"fp32 {name}") for name in ("mean", "rstd")]
    in_order = _format_of_group_norm(call) is torch.contiguous_format
    if not in_order or (call.HxW > 1 and not (call.weight is None and call.bias is None)):
        size = batch * channels * _accumulate_bytes(tensor)
        taken += [script.take(size, name) for name in ("scale per channel", "shift per channel")]
    return script.give(*reversed(taken), *copies)


@recorded_rule("aten.native_group_norm_backward.default")
def group_norm_backward_rule(call: Call) -> Script | None:
    batch, channels, groups = call.N, call.C, call.group
    size = _accumulate_bytes(call.input)
    script, kept = Script(), _format_of_group_norm(call)
    gradients = Gradients(script, call.output_mask)
    copies = []
    if not call.grad_out.is_contiguous(memory_format=kept):
        copies = [script.take(bytes_of(call.input), "gradient in the input's memory format")]
    gradients.emit(0, 1, 2)
    sums = []
    # 2.11, 2.13 and 2.15 were recorded with one row; 2.14 is taken to do as 2.13.
    is_one_row = versions.GROUP_NORM_KEEPS_CHANNELS_LAST.holds(call.card.torch_version) and call.HxW == 1
    if not is_one_row or kept is not torch.contiguous_format:  # else GroupNorm1dBackward; 2.13 has them then, too
        sums = [script.take(batch * channels * size, "sums per channel") for _ in range(2)]
    if 0 in gradients:
        factors = [script.take(batch * groups * size, "factors per group") for _ in range(2)]
        scaled = call.weight is not None and call.HxW > 1 and kept is torch.contiguous_format
        scale = [script.take(batch * channels * size, "scale per channel")] if scaled else []
        script.give(*reversed(factors), *scale)
    return script.give(*reversed(sums), *copies)


def _format_of_group_norm(call: Call) -> torch.memory_format:
    """In which the kernel reads and writes."""
    if versions.GROUP_NORM_KEEPS_CHANNELS_LAST.holds(call.card.torch_version):
        return suggest_memory_format(call.input)
    return torch.contiguous_format


# --- native batch norm (ATen/native/cuda/Normalization.cu, .cuh) ------------------------------------------------------

#: Normalization.cuh: MAX_BLOCK_SIZE, OPTIMAL_TILE_W, ELEMENTS_PER_THREAD, MAX_H_BLOCK.
_BLOCK, _TILE, _PER_THREAD, _MAX_BLOCKS = 512, 32, 16, 128


def _layout(tensor: torch.Tensor) -> str:
    """Which of the three implementations a tensor is fit for: batch_norm_choose_impl."""
    if tensor.numel() > 2**31 - 1:
        return "general"
    if tensor.is_contiguous():
        return "channels_last" if tensor.stride(1) == 1 else "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return "general"


def _channels_last_grid(tensor: torch.Tensor) -> tuple[int, int]:
    """flexible_launch_configs with the cooperative flag: blocks along the channels and along the reduction."""
    channels = int(tensor.shape[1])
    rows = int(tensor.numel()) // channels
    width = min(last_pow2(channels), _TILE)
    height = min(last_pow2(-(-rows // _PER_THREAD)), _BLOCK // width)
    if width * height != _BLOCK:
        width = min(last_pow2(channels), _BLOCK // height)
    blocks = min(-(-rows // (height * _PER_THREAD)), _MAX_BLOCKS)
    return -(-channels // width), 1 if blocks < 8 else blocks


def _channels_last_staging(script: Script, tensor: torch.Tensor, values: int) -> None:
    grid, blocks = _channels_last_grid(tensor)
    if blocks > 1:
        size = values * tensor.shape[1] * blocks * _accumulate_bytes(tensor)
        staging = script.take(size, "batch norm staging")
        script.scratch(4 * grid, "batch norm semaphores").give(staging)


@recorded_rule(
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit.no_stats",
)
def native_batch_norm_rule(call: Call) -> Script | None:
    script, tensor = Script(), call.input
    stats = tensor.shape[1] * _accumulate_bytes(tensor)
    script.output(0).output(1, stats).output(2, stats)
    layout = _layout(tensor)
    if call.training and layout == "channels_last":
        _channels_last_staging(script, tensor, values=4)
    elif call.training and layout == "general":
        _general_statistics(script, tensor, call.card)
    return script


def _general_statistics(script: Script, tensor: torch.Tensor, card: Card) -> None:
    """var_mean over all dimensions but the channels; half types are cast to fp32 first."""
    dims = [dim for dim in range(tensor.dim()) if dim != 1]
    size = _accumulate_bytes(tensor)
    kernel = Kernel(size, 4 * size, (size, size), input_vector=2, accumulates_in_output=False)
    layout: Strided = tensor
    copies = []
    if _is_half(tensor):
        layout = Layout.dense_like(tensor)
        copies.append(script.take(tensor.numel() * size, "fp32 input"))
    reduction_buffers(layout, dims, False, kernel, card).write(script)
    script.give(*copies)


@recorded_rule("aten.native_batch_norm_backward.default")
def native_batch_norm_backward_rule(call: Call) -> Script | None:
    grad, tensor, weight = call.grad_out, call.input, call.weight
    training, mask = call.train, call.output_mask
    script = Script()
    gradients = Gradients(script, mask if weight is not None else (mask[0], False, False))
    channels_last = tensor.is_contiguous() and tensor.stride(1) == 1
    channels_last |= tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    reduces = training or mask[1] or mask[2]
    if reduces and mask[0] and not channels_last and max(tensor.numel(), grad.numel()) < 2**31:
        gradients.emit(0, 1, 2)
        return script
    stats = tensor.shape[1] * _accumulate_bytes(tensor)
    deviations = [] if training else [script.take(stats, "deviations of the running variance")]
    sums = []
    if reduces:
        sums = [script.take(stats, "sums per channel") for _ in range(2)]
        gradients.emit(1, 2)
        if _layout(grad) == "channels_last" and channels_last:
            _channels_last_staging(script, tensor, values=2)
    gradients.emit(0)
    return script.give(*reversed(sums), *deviations)


# --- SyncBatchNorm: statistics, what the processes make of them, and the rest (the same files) ------------------------


@recorded_rule("aten.batch_norm_stats.default", "aten.batch_norm_backward_reduce.default")
def sync_batch_norm_rule(call: Call) -> Script:
    """The statistics are staged where all that is read is channels_last: four values of a channel, two backward."""
    script, is_backward = Script.of(call), len(call.all_tensors) > 1
    read = call.all_tensors[:2] if is_backward else [call.input]
    if {_layout(tensor) for tensor in read} == {"channels_last"}:
        _channels_last_staging(script, call.input, values=2 if is_backward else 4)
    return script


# --- cuDNN batch norm (aten/src/ATen/native/cudnn/BatchNorm.cpp) ------------------------------------------------------


@recorded_rule("aten.cudnn_batch_norm.default")
def cudnn_batch_norm_rule(call: Call) -> Script | None:
    tensor, training = call.input, call.training
    script = Script().output(0)
    if training:
        stats = tensor.shape[1] * _accumulate_bytes(tensor)
        script.output(1, stats).output(2, stats)
        if _is_channels_last(tensor):
            size = cudnn_batch_norm_workspace(tensor, backward=False)
            script.scratch(size, "cuDNN batch norm workspace")
    return script


@recorded_rule("aten.cudnn_batch_norm_backward.default")
def cudnn_batch_norm_backward_rule(call: Call) -> Script | None:
    tensor, grad = call.input, call.grad_output
    channels_last = _is_channels_last(tensor)
    script = Script()
    copies = []
    if channels_last != _is_channels_last(grad) or not (channels_last or grad.is_contiguous()):
        copies = [script.take(bytes_of(grad), "gradient in the input's memory format")]
    script.outputs(*range(len(call.outputs)))
    if channels_last:
        script.scratch(cudnn_batch_norm_workspace(tensor, backward=True), "cuDNN batch norm workspace")
    return script.give(*copies)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 3 and View.of(tensor).suggests_channels_last()


def cudnn_batch_norm_workspace(tensor: torch.Tensor, *, backward: bool) -> int:
    """Workspace of cuDNN's persistent NHWC batch norm in training; the NCHW kernel asks none.

    Observed, cuDNN 9.20: every tile of channels leaves two fp32 sums per channel, and in forward a flag, for every
    block of rows. The same for all capabilities and SM counts tried (8.0, 8.6, 9.0; 84 and 132 SMs).
    """
    channels = int(tensor.shape[1])
    rows = int(tensor.numel()) // channels
    tile = 64 if channels % 4 == 0 else 16 if channels > 4 else 4
    rows_per_block = 96 if backward else 64 if tensor.element_size() == 4 else 160
    if tile == 4:
        rows_per_block *= 4
    per_block = 2 * tile * 4 + (0 if backward else 4)
    fixed = 1056 if backward else 1072
    return fixed + -(-channels // tile) * (4 + per_block * -(-rows // rows_per_block))
