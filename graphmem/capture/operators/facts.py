"""The record of an operator, with all that is known of it: ``python -m graphmem.explain aten.index_put_`` prints it.

The tables it is built from stand in the files of this room and of ``kernels``, each by the reason for its entries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from graphmem.capture.kernels import PROOFS, rule_of
from graphmem.capture.kernels.parts.known import ASSUMED, LAYOUTS, is_bounded, proven, proven_layouts, unmodelled
from graphmem.capture.kernels.parts.script import BoundRule
from graphmem.capture.operators import (
    Decomposition,
    Shapes,
    bitsandbytes,
    collectives,
    flash_attention,
    kernel_decompositions,
    nested,
    packed_products,
    quanto,
    sparse,
    torchvision,
)
from graphmem.capture.operators.autocast import autocast_of
from graphmem.capture.operators.collectives import COLLECTIVES, MAKES_HOST_VALUES
from graphmem.capture.operators.composites import FUSED_ON_CUDA, SHAPES, composite_operators
from graphmem.capture.operators.data_dependent_sizes import SELECTING
from graphmem.capture.operators.gradient_formulas import GRADIENT_FORMULAS, IN_PLACE_IN_BACKWARD, GradientFormula
from graphmem.capture.operators.output_layouts import Relaid, relaid
from graphmem.capture.torch_internals import OpOverload, has_kernel
from graphmem.capture.values.device_values import TRACKED
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private

_aten = torch.ops.aten

#: Operators that end in a cuBLAS call on CUDA, which may take a workspace.
CALLS_CUBLAS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addbmm.default,
    _aten._scaled_mm.default, _aten._scaled_mm.out,
    _aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten.vdot.default, _aten._int_mm.default,
    _aten.addmm_.default, _aten.baddbmm_.default, _aten.mm.out, _aten.addmm.out, _aten.bmm.out, _aten.baddbmm.out,
    *(
        getattr(packet, overload)
        for packet in (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm)
        for overload in ("dtype", "dtype_out")
        if overload in packet.overloads()  # since PyTorch 2.7
    ),
}  # fmt: skip

#: Operators whose first argument's storage may be another size afterwards.
RESIZES = {_aten.resize_.default, _aten.resize_as_.default, _aten.set_.source_Tensor}

#: What a subscript calls: the second argument is a list of indices, some of them lists that were made tensors.
SUBSCRIPTS = {_aten.index.Tensor, _aten.index_put_.default}

#: Answers about whole tensors that are one Python value.
DECISIONS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default}

#: Operators that read lengths on the host, though PyTorch does not tag them so.
SIZED_BY_DATA = {_aten._pack_padded_sequence.default}

#: Fused steps of optimizers, which need not be called at all: one kernel a group of tensors that writes in place and
#: allocates nothing. PyTorch lacks the meta kernels of some (``aten/src/ATen/native/cuda/FusedSgdKernel.cu``, …).
FUSED_STEPS = {
    getattr(packet, overload)
    for packet in (_aten._fused_sgd_, _aten._fused_adagrad_, _aten._fused_adam_, _aten._fused_adamw_)
    for overload in packet.overloads()
}


#: Tables of operators whose memory is modelled where the entry stands.
_MODELLED = (
    kernel_decompositions.DECOMPOSITIONS, kernel_decompositions.COMPARISONS, SELECTING, FUSED_STEPS,
    COLLECTIVES, sparse.DECOMPOSITIONS, sparse.PARTS,
)  # fmt: skip
_COMPOSITE = "CompositeImplicitAutograd"
#: Lines of the dispatcher's table for the kernel that a card runs, and the file that registered it
#: (``OperatorEntry::dumpState``, ATen/core/dispatch/OperatorEntry.cpp).
_KERNELS = [
    re.compile(rf"^({key})(?:\[alias\])?: registered at (.+):\d+ ::", re.MULTILINE)
    for key in ("CUDA", "CompositeExplicitAutograd")
]
#: Namespaces of operators that are PyTorch's own.
_OF_PYTORCH = {"aten", "prim", "prims", "c10d", "_c10d_functional", "_dtensor", "symm_mem", "inductor", "quantized"}
_dispatch_table: Any = private(
    "torch._C._dispatch_dump", "memory that operators written in Python take inside is not counted", lambda _: ""
)
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, eq=False)
class OperatorFacts:
    """One overload.

    ``rule``: its kernel's memory beyond the outputs; ``unmodelled``: known memory that no rule models. ``is_modelled``:
    a rule, a decomposition or another table here has its memory. ``is_checked``: recordings prove its rule, or that it
    takes nothing but its outputs, or another table models it. ``decomposition``: the operators that CUDA's kernel is
    made of, which run in place of its fake kernel; ``sparse_decomposition``, ``nested_decomposition``: those where an
    argument is sparse or nested. ``in_place``: the operator that a formula of gradients calls instead on a card, and
    the autograd nodes that do so; ``gradient_formula``: the same where it is more than writing in place. ``selects``:
    the size of its outputs is data. ``relaid``: gives its outputs a card's strides. ``is_step``: a fused step of an
    optimizer, which allocates nothing and is not called.
    """

    func: OpOverload
    name: str
    rule: BoundRule | None
    unmodelled: str | None
    is_modelled: bool
    is_checked: bool
    decomposition: Decomposition | None
    sparse_decomposition: Decomposition | None
    nested_decomposition: Decomposition | None
    makes_nested: bool
    in_place: tuple[OpOverload, frozenset[str]] | None
    gradient_formula: GradientFormula | None
    selects: bool
    is_step: bool
    relaid: Relaid | None
    is_collective: bool
    is_decision: bool
    is_subscript: bool
    calls_cublas: bool
    resizes: bool
    makes_host_values: bool
    tracks_value: bool
    is_fused_on_cuda: bool
    is_composite: bool

    @cached_property
    def decomposes(self) -> bool:
        """True if inference mode hands it over whole though a card runs its decomposition.

        The C++ decomposition counts, not the one that Python has for tracing and ``OpOverload.decompose`` prefers
        (``torch/_ops.py``): an interpolation is one kernel on a card, and arithmetic on indices there.
        """
        if self.is_fused_on_cuda or not isinstance(self.func, OpOverload):
            return False
        return bool(has_kernel(self.func.name(), _COMPOSITE))

    @cached_property
    def writes_first(self) -> bool:
        """True if it writes to its first argument, a tensor."""
        arguments = self.func._schema.arguments
        first = arguments[0].alias_info if arguments else None
        return first is not None and first.is_write and str(arguments[0].type) == "Tensor"

    @cached_property
    def is_view(self) -> bool:
        """True if it returns a view of its first argument."""
        return bool(getattr(self.func, "is_view", False))

    @cached_property
    def remark(self) -> Diagnostic | None:
        """The reservation of a report about its memory; None where there is none."""
        if self.name in ASSUMED:
            return ASSUMED[self.name].about()
        if self.unmodelled is not None:
            code = Code.ESTIMATED if is_bounded(self.name) else Code.NOT_MODELLED
            return code.about(operator=self.name, memory=self.unmodelled)
        return None if self.is_checked else Code.NOT_CHECKED.about(operator=self.name)

    @cached_property
    def unproven_layouts(self) -> frozenset[str]:
        """Layouts of inputs in which nobody recorded it, though it is proven of contiguous ones and has no rule.

        A pointwise operator reads its inputs where they are (``TensorIterator``, ATen/TensorIterator.h, 2.13), and on
        lists whose tensors are not alike it is called for each one (ATen/native/ForeachUtils.h).
        """
        if self.is_modelled or self.is_view or self.remark is not None or not proven(self.name):
            return frozenset()
        if not any("Tensor" in str(argument.type) for argument in self.func._schema.arguments):
            return frozenset()
        if torch.Tag.pointwise in getattr(self.func, "tags", ()) or self.name.startswith("aten._foreach_"):
            return frozenset()
        return LAYOUTS - proven_layouts(self.name)

    @cached_property
    def autocast(self) -> str | None:
        """The casts of its arguments under autocast, in words."""
        return autocast_of(self.func)

    @cached_property
    def shape(self) -> Shapes | None:
        """The meta kernel that replaces PyTorch's own; None where that is used."""
        namespace, name, overload = self.name.split(".")
        return SHAPES.get(f"{namespace}::{name}") if overload == "default" else None

    @cached_property
    def sized_by_data(self) -> bool:
        """True if the size of its outputs is data, or their values are read back."""
        return (
            self.selects or self.is_decision or self.func in SIZED_BY_DATA or bool(_DATA_DEPENDENT & {*self.func.tags})
        )

    @cached_property
    def python_kernel(self) -> str | None:
        """The dispatch key at which a card finds a function in Python for it (``torch.library``), whose operators
        nothing here models; None where a kernel in C++ runs, or its memory is known."""
        if not isinstance(self.func, OpOverload) or self.func.namespace in _OF_PYTORCH or self.is_modelled:
            return None
        kernel = next(filter(None, (line.search(_dispatch_table(self.func.name())) for line in _KERNELS)), None)
        return kernel[1] if kernel is not None and kernel[2].endswith(".py") else None

    @cached_property
    def takes_pinned(self) -> bool:
        """True if it can be asked to make a tensor in pinned host memory."""
        arguments = self.func._schema.arguments
        return self.func is _aten._pin_memory.default or any(one.name == "pin_memory" for one in arguments)


def _takes_outputs_only(func: OpOverload) -> bool:
    """True if recordings prove it, of a pointwise operator that writes to its input also those of the one that makes an
    output: both are one loop of ``TensorIterator``."""
    library, name, overload = str(func).split(".")
    if proven(str(func)) or library != "aten" or not name.endswith("_"):
        return proven(str(func))
    maker = getattr(getattr(torch.ops.aten, name[:-1], None), overload, None)
    return maker is not None and torch.Tag.pointwise in maker.tags and proven(str(maker))


@cache
def facts_of(func: OpOverload) -> OperatorFacts:
    """The facts of an overload such as ``torch.ops.aten.add.Tensor``."""
    name = str(func)
    rule = rule_of(name)
    decomposition = (
        kernel_decompositions.DECOMPOSITIONS.get(func)
        or collectives.DECOMPOSITIONS.get(func)
        or torchvision.DECOMPOSITIONS.get(name)
        or flash_attention.DECOMPOSITIONS.get(name)
        or packed_products.DECOMPOSITIONS.get(name)
        or quanto.DECOMPOSITIONS.get(name)
        or bitsandbytes.decomposition_of(func)
    )
    tabled = decomposition is not None or any(func in table for table in _MODELLED)
    modelled = rule is not None or tabled
    has_proof = name in PROOFS if rule is not None else _takes_outputs_only(func) or bitsandbytes.is_update(func)
    return OperatorFacts(
        func=func,
        name=name,
        rule=rule,
        unmodelled=unmodelled(name, modelled),
        is_modelled=modelled,
        is_checked=has_proof or tabled or getattr(func, "is_view", False),
        decomposition=decomposition,
        sparse_decomposition=sparse.DECOMPOSITIONS.get(func),
        nested_decomposition=nested.MAKING.get(func) or nested.DECOMPOSITIONS.get(func),
        makes_nested=func in nested.MAKING,
        in_place=IN_PLACE_IN_BACKWARD.get(func),
        gradient_formula=GRADIENT_FORMULAS.get(func),
        selects=func in SELECTING,
        is_step=func in FUSED_STEPS,
        relaid=relaid(func),
        is_collective=func in COLLECTIVES,
        is_decision=func in DECISIONS,
        is_subscript=func in SUBSCRIPTS,
        calls_cublas=func in CALLS_CUBLAS,
        resizes=func in RESIZES,
        makes_host_values=func in MAKES_HOST_VALUES,
        tracks_value=func in TRACKED,
        is_fused_on_cuda=func in FUSED_ON_CUDA,
        is_composite=func in composite_operators(),
    )
