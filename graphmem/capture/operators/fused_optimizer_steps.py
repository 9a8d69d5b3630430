"""The fused steps of optimizers: one kernel a group of tensors that writes in place and allocates nothing.

``torch/_meta_registrations.py`` has no meta kernel for some of them, and a fake run would try the real one
(``aten/src/ATen/native/cuda/FusedSgdKernel.cu``, ``FusedAdagradKernel.cu``).
"""

from __future__ import annotations

import torch

from graphmem.capture.torch_internals import OpOverload

_NAMES = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")


def _overloads() -> set[OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in _NAMES if hasattr(torch.ops.aten, name)]
    return {getattr(packet, overload) for packet in packets for overload in packet.overloads()}


#: Operators that need not be called at all.
FUSED_STEPS = _overloads()
