"""optimum-quanto's operators on a card, of its quantised caches of keys and values.

Quantising is Python for any device (``optimum/quanto/library/quantize.py``, 0.2.7), of which the dispatcher shows one
operator; packed values are unpacked on CUDA by a kernel of its own, which its package compiles when it is first needed
(``library/extensions/cuda/unpack.cu``) and without which it fails there: one buffer, where Python's has several.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from graphmem.capture.operators import Decomposition
from graphmem.capture.torch_internals import FakeTensor
from graphmem.capture.values.assumed_values import Selection

_BITS_OF_BYTE = 8


def _unpack(_: Selection, packed: torch.Tensor, bits: int) -> torch.Tensor:
    """``allocate_output`` of ``unpack.cu``."""
    return packed.new_empty((packed.shape[0] * (_BITS_OF_BYTE // bits), *packed.shape[1:]))


def _quantize_affine(
    _: Selection,
    base: torch.Tensor,
    bits: int,
    axis: int,
    group_size: int | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    _pack_fake_tensors()
    if group_size is not None:
        base = sys.modules["optimum.quanto.tensor.grouped"].group(base, axis=axis, group_size=group_size)
    # A shift that is no float is the whole number that stands for zero.
    is_float = shift.dtype.is_floating_point
    data = torch.round((base + shift) / scale) if is_float else torch.round(base / scale) + shift
    return torch.clamp(data, min=0, max=2**bits - 1).to(torch.uint8)


@functools.cache
def _pack_fake_tensors() -> None:
    """``WeightQBitsTensor`` packs tensors of the type ``torch.Tensor`` (``tensor/weights/qbits.py``), and a pretended
    tensor is of another: it is packed before. Real tensors are untouched, so this may stay."""
    weights = sys.modules["optimum.quanto.tensor.weights.qbits"].WeightQBitsTensor
    packed = sys.modules["optimum.quanto.tensor.packed"].PackedTensor
    original = weights.__init__

    def init(
        self: object, qtype: Any, axis: object, group: object, size: object, stride: object, data: Any, *rest: object
    ) -> None:
        if type(data) is FakeTensor:
            data = packed.pack(data, qtype.bits)
        original(self, qtype, axis, group, size, stride, data, *rest)

    weights.__init__ = init


#: Operator by full name -> its decomposition. The package is not imported by this.
DECOMPOSITIONS: dict[str, Decomposition] = {
    "quanto.unpack.default": _unpack,
    "quanto.quantize_affine.default": _quantize_affine,
}
