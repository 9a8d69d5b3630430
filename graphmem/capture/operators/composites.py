"""Composite operators that a CUDA build resolves otherwise than the fake run would.

Each function in the tables of this room stands for one composite ``aten`` operator and calls the operators that CUDA's
version of it calls; their autograd formulas and meta kernels exist in every build. They are installed in the dispatcher
(AutogradCUDA), so they also act inside C++ composites, and given to the recorder for inference mode, where composites
arrive whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import NoReturn

import torch

from graphmem.capture.device.torch_versions import ExistingFakes
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.operators import Decomposition, Shapes
from graphmem.capture.operators.attention import attention_composites
from graphmem.capture.operators.convolutions import CONVOLUTIONS
from graphmem.capture.operators.ctc import CTC, CTC_SHAPES
from graphmem.capture.operators.gradient_operators import GRADIENT_OPERATORS
from graphmem.capture.operators.gradients_by_version import formulas_of_version
from graphmem.capture.operators.layers_and_losses import LAYERS_AND_LOSSES
from graphmem.capture.operators.meta_kernels import META_KERNELS
from graphmem.capture.operators.normalization import normalization_composites
from graphmem.capture.operators.operators_by_version import older_composites, patch_indexing
from graphmem.capture.operators.output_layouts import patch_views
from graphmem.capture.operators.recurrent.cells import CELL_SHAPES
from graphmem.capture.operators.recurrent.cudnn import CUDNN_SHAPES
from graphmem.capture.operators.recurrent.operators import recurrent_composites
from graphmem.capture.operators.transformer_layers import transformer_layers
from graphmem.capture.patches import Kernels, Patches
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.known_values import KnownValues
from graphmem.devices import DEFAULT_DEVICE, device_named

_aten = torch.ops.aten

#: Operators with a CUDA kernel *and* a composite fallback; the three that the dispatcher of 2.13's CUDA build lists.
FUSED_ON_CUDA = tuple(
    getattr(_aten, name).default
    for name in ("_fused_rms_norm", "mish_backward", "silu_backward")
    if hasattr(_aten, name)
)


@contextlib.contextmanager
def cuda_composites(card: Card, values: KnownValues | None = None) -> Iterator[dict[OpOverload, Decomposition]]:
    """Install CUDA's versions of composites for the duration; yields them by operator. ``values``: known values of host
    tensors, by which some decide."""
    table = composites_on(card, values or KnownValues())
    kernels, fakes, patches = Kernels(), ExistingFakes(), Patches()
    try:
        patch_indexing(patches, card.torch_version)
        patch_views(patches)
        for op, function in table.items():
            kernels.set(op, function, "AutogradCUDA")
        for op in FUSED_ON_CUDA:
            kernels.set(op, _never_called, "CUDA")
        fakes.replace(SHAPES)
        yield table
    finally:
        patches.undo()
        fakes.restore()
        kernels.undo()


def _never_called(*_: object, **__: object) -> NoReturn:
    """A CUDA kernel's place: its presence makes the dispatcher take the operator's own gradient formula. Fake tensors
    are intercepted before they would arrive here."""
    raise AssertionError("a kernel ran on a fake tensor")


#: By operator name (``aten::...``): fake implementations in place of those that PyTorch lacks.
SHAPES: dict[str, Shapes] = {**META_KERNELS, **CTC_SHAPES, **CELL_SHAPES, **CUDNN_SHAPES}


@cache
def composite_operators() -> frozenset[OpOverload]:
    """The operators that have a version of CUDA's here, on whatever card."""
    return frozenset(composites_on(Card(device_named(DEFAULT_DEVICE)), KnownValues()))


def composites_on(card: Card, values: KnownValues) -> dict[OpOverload, Decomposition]:
    """Composite operators -> their decompositions in a build for ``card``."""
    return {
        **GRADIENT_OPERATORS,
        **recurrent_composites(card, values),
        **transformer_layers(card),
        **LAYERS_AND_LOSSES,
        **CONVOLUTIONS,
        **CTC,
        **normalization_composites(card),
        **attention_composites(card),
        **older_composites(card.torch_version),
        **formulas_of_version(card.torch_version),
    }
