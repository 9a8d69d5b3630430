"""Composite operators that a CUDA build resolves otherwise than the fake run would.

Each function in the tables of this room stands for one composite ``aten`` operator and calls the operators that CUDA's
version of it calls; their autograd formulas and meta kernels exist in every build. They are installed in the dispatcher
(AutogradCUDA), so they also act inside C++ composites, and given to the recorder for inference mode, where composites
arrive whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NoReturn

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.operators import Decomposition, Shapes
from graphmem.capture.operators.attention import ATTENTION, patch_jagged_attention
from graphmem.capture.operators.autocast import SCRIPTED
from graphmem.capture.operators.convolutions import CONVOLUTIONS
from graphmem.capture.operators.ctc import CTC, CTC_SHAPES
from graphmem.capture.operators.gradient_operators import GRADIENT_OPERATORS
from graphmem.capture.operators.gradients_by_version import FORMULAS, formulas_of_the_past, with_gradient
from graphmem.capture.operators.layers_and_losses import BATCH_NORM, GROUP_NORM, LAYERS_AND_LOSSES, RMS_NORM
from graphmem.capture.operators.meta_kernels import META_KERNELS, ExistingFakes
from graphmem.capture.operators.operators_by_version import TAKE_ALONG_DIM, patch_indexing
from graphmem.capture.operators.output_layouts import patch_views
from graphmem.capture.operators.recurrent.cells import CELL_SHAPES
from graphmem.capture.operators.recurrent.cudnn import CUDNN_SHAPES, DropoutState
from graphmem.capture.operators.recurrent.operators import CELLS, NETWORKS
from graphmem.capture.operators.transformer_layers import TRANSFORMER_LAYERS
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


@dataclass(frozen=True)
class Build:
    """A CUDA build of PyTorch in one run, on a card. ``values``: known values of host tensors, by which some decide."""

    card: Card
    values: KnownValues

    @cached_property
    def dropout(self) -> DropoutState:
        """cuDNN's generators."""
        return DropoutState(self.card)

    def is_other(self, change: versions.Since) -> bool:
        """True if one of this version and the installed one is before the change, and the other is not."""
        return change.holds(self.card.torch_version) != change.holds(versions.version_of(torch.__version__))


@contextlib.contextmanager
def cuda_composites(card: Card, values: KnownValues) -> Iterator[dict[OpOverload, Decomposition]]:
    """Install CUDA's versions of composites for the duration; yields them by operator."""
    build = Build(card, values)
    table = composites_of(build)
    kernels, fakes, patches = Kernels(), ExistingFakes(), Patches()
    try:
        skipped = versions.WHOLE_SLICES_SKIPPED
        if build.is_other(skipped) and not skipped.holds(card.torch_version):
            patch_indexing(patches)
        patch_views(patches)
        patch_jagged_attention(patches, card)
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
    return frozenset(composites_of(Build(Card(device_named(DEFAULT_DEVICE)), KnownValues())))


def composites_of(build: Build) -> dict[OpOverload, Decomposition]:
    """Composite operators -> their decompositions in a build."""
    version = build.card.torch_version
    table = {**GRADIENT_OPERATORS, **CELLS, **LAYERS_AND_LOSSES, **CONVOLUTIONS, **CTC, **BATCH_NORM, **SCRIPTED}
    table |= formulas_of_the_past(version)
    table |= {op: partial(function, build) for op, function in NETWORKS.items()}
    of_card = {**TRANSFORMER_LAYERS, **RMS_NORM, **ATTENTION}
    table |= {op: partial(function, build.card) for op, function in of_card.items()}
    if versions.GROUP_NORM_COPIES_INSIDE.holds(version):
        table |= GROUP_NORM
    if not versions.TAKE_ALONG_DIM_COPIES.holds(version):
        table |= TAKE_ALONG_DIM
    for change, before, now in FORMULAS:
        if build.is_other(change):
            table |= {op: with_gradient(op, of) for op, of in (now if change.holds(version) else before).items()}
    return table
