"""Tensors in nested values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphmem.capture.torch_internals import FakeTensor, inside_transform, is_transformed_tensor

#: The precisions of a step.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

#: The floating-point types of 16 bits.
HALF_TYPES = (torch.float16, torch.bfloat16)

#: The layouts of sparse tensors that are followed; of a compressed one, one kind of indices is counted.
COMPRESSED = (torch.sparse_csr, torch.sparse_csc)
SPARSE = (torch.sparse_coo, *COMPRESSED)

#: Where C++ and the fake mode find tensors of the device ``meta``, which hold nothing anywhere: a device of their own,
#: for to both of them every tensor of the card is on ``meta``. No tensor of a program is on a second host.
NOWHERE = torch.device("cpu", 1)


def tensors_in(value: object) -> Iterator[Any]:
    """Every tensor in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    items = parts_of(value) if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
    for item in items:  # asked for every operator: nothing is called for what cannot hold a tensor
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple, dict)):
            yield from tensors_in(item)


def parts_of(value: list[Any] | tuple[Any, ...]) -> Sequence[Any]:
    """The items of a list or tuple; a class of the program's that is one is asked nothing (e3nn's ``Irrep`` is a pair
    without a length)."""
    if type(value) in (list, tuple):
        return value
    return list.copy(value) if isinstance(value, list) else tuple.__getitem__(value, slice(None))


def innermost(tensor: Any) -> Any:
    """The tensor that transforms of ``torch.func`` have wrapped; any other itself."""
    while is_transformed_tensor(tensor):
        tensor = inside_transform(tensor)
    return tensor


def has_sparse(value: object) -> bool:
    """True if one of the tensors in ``value`` is sparse, in COO, CSR or CSC layout."""
    return any(tensor.layout in SPARSE for tensor in tensors_in(value))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of, as they lie in it: indices before values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def on_device(value: object) -> bool:
    """Whether one of the tensors in ``value`` is on the pretended device."""
    for tensor in tensors_in(value):  # noqa: SIM110 (asked for every operator: no generator around the generator)
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
            return True
    return False
