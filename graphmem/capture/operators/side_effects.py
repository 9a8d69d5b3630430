"""Tables of operators that do more than make outputs: call cuBLAS, resize a storage, make tensors of lists, or ask for
data."""

from __future__ import annotations

import torch

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
