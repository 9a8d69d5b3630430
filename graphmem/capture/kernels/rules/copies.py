"""Copies between host and device that one ``cudaMemcpyAsync`` cannot do need a packed tensor on the way.

Source: ``copy_requires_temporaries`` and ``copy_kernel_cuda`` (ATen/native/cuda/Copy.cu, PyTorch 2.4 to 2.13). Only
memory of the device is recorded here.
"""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule


@recorded_rule("aten._to_copy.default", "aten.copy_.default")
def host_device_copy(call: Call) -> Script | None:
    """A source on the device is packed if it has gaps or another order than the destination; a destination on the
    device is filled by way of a packed one of the source's type. Types are converted on the host, unless the copy is
    non-blocking: then on the device."""
    source = call.get("src")  # of copy_ alone
    made = source is None
    source, destination = (call.self, call.outputs[0]) if made else (source, call.self)
    if not isinstance(source, torch.Tensor) or source.is_cuda == destination.is_cuda or destination.numel() == 0:
        return None
    same_type = source.dtype is destination.dtype
    if same_type and _one_block(source, destination):
        return None
    non_blocking = bool(call.non_blocking)
    script = Script()
    if made:
        script.output(0)
    if source.is_cuda:
        _from_device(script, source, destination, convert=non_blocking and not same_type)
    elif not destination.is_contiguous() or (non_blocking and not same_type):
        element = source.element_size() if non_blocking else destination.element_size()
        script.scratch(destination.numel() * element, "packed copy from the host")
    return script


def _from_device(script: Script, source: torch.Tensor, destination: torch.Tensor, *, convert: bool) -> None:
    tokens = []
    packed = source.is_contiguous() and source.shape == destination.shape
    if convert:
        tokens.append(script.take(source.numel() * destination.element_size(), "converted copy to the host"))
    element = destination.element_size() if convert else source.element_size()
    if not packed:
        tokens.append(script.take(destination.numel() * element, "packed copy to the host"))
        if convert:
            script.give(tokens.pop(0))
    script.give(*tokens)


def _one_block(source: torch.Tensor, destination: torch.Tensor) -> bool:
    """True if both tensors walk memory without gaps in the same order (``TensorIterator::is_contiguous``)."""
    if source.shape != destination.shape:
        return bool(source.numel() == 1 and destination.numel() == 1)
    expected = 1
    dims = [dim for dim in range(source.dim()) if source.shape[dim] != 1]
    for dim in sorted(dims, key=lambda dim: (destination.stride(dim), source.stride(dim))):
        if destination.stride(dim) != expected or source.stride(dim) != expected:
            return False
        expected *= source.shape[dim]
    return True
