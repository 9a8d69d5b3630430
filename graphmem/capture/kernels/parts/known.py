"""Operators without a rule: those proven to take only their outputs, and those known to take more.

Such an operator counts as one that allocates its outputs and nothing else. ``outputs_only.json`` beside this file lists
the proven ones, with their proof; it is generated from recordings (``tests/recorded/op_db/outputs_only.py``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import torch

from graphmem.capture.kernels.parts.layout import is_dense
from graphmem.diagnostics import Code


def read_table(name: str) -> dict[str, Any]:
    """A table of operators beside this file."""
    table: dict[str, Any] = json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return table


#: ``unmodelled.json``. ``memory``: beginning of an operator's name -> what it holds; the longest that fits counts.
#: ``estimated``: those that have a rule all the same, which estimates. ``libraries``: namespaces of operators whose
#: kernels have rules, or allocate nothing but outputs.
_TABLE = read_table("unmodelled.json")
_UNMODELLED: dict[str, str] = _TABLE["memory"]
_ESTIMATED, _MODELLED_LIBRARIES = tuple(_TABLE["estimated"]), set(_TABLE["libraries"])

#: Of those, calls that the rule knows all of.
_EXACT: dict[str, Callable[[Sequence[Any]], bool]] = {
    # Compared with each of a few: ``isin_Tensor_Tensor_out``, ATen/native/TensorCompare.cpp (2.13).
    "aten.isin.Tensor_Tensor": lambda args: args[1].numel() < int(10.0 * args[0].numel() ** 0.145),
}

#: Overloads -> those that do the same: without a generator, which call them with none, or making the tensor that these
#: are given (seeds of compiled dropout): ATen/native/TensorFactories.cpp (2.13).
_SAME = {
    "aten.randint.generator": "aten.randint.default",
    "aten.randint.low_generator": "aten.randint.low",
    "aten.randint.low_out": "aten.randint.low",
    "aten.randn.generator": "aten.randn.default",
}

#: Operator -> what is assumed of values that a card has and an analysis has not.
ASSUMED = {
    "aten._ctc_loss.Tensor": Code.CTC_TARGETS,
    "aten._ctc_loss.default": Code.CTC_TARGETS,
    "aten.linalg_matrix_exp.default": Code.MATRIX_EXPONENTIAL,
}

#: Beginnings of names of operators whose memory has bounds of its own, which its storages carry.
_BOUNDED = "aten._fft_"


def is_bounded(name: str) -> bool:
    """True if the memory of an operator that is estimated is known to bounds."""
    return name.startswith(_BOUNDED)


def unmodelled(name: str, modelled: bool = False) -> str | None:
    """The unmodelled memory of an operator such as ``aten._fft_r2c.default``, in words; None if none is known.
    An operator that is ``modelled``, by a rule or otherwise, hides nothing, unless it is estimated."""
    if modelled and not name.startswith(_ESTIMATED):
        return None
    if name.partition(".")[0] not in _MODELLED_LIBRARIES:
        return "a kernel outside PyTorch, of which only the outputs are known"
    found = [beginning for beginning in _UNMODELLED if name.startswith(beginning)]
    if found:
        return _UNMODELLED[max(found, key=len)]
    return "buffers that a recording shows" if name in _evidence()["taking"] else None


def proven(name: str) -> bool:
    """True if recordings prove that the operator allocates its outputs and nothing else, of contiguous inputs."""
    return _SAME.get(name, name) in _evidence()["proven"]


#: How inputs of a kernel may lie that are not contiguous: :func:`layout_of`.
LAYOUTS = frozenset(("channels_last", "permuted", "sliced"))


def proven_layouts(name: str) -> frozenset[str]:
    """In which of :data:`LAYOUTS` the same is proven: a kernel may copy inputs that are not contiguous."""
    return frozenset(_evidence().get("layouts", {}).get(name, ()))


def layout_of(tensor: torch.Tensor) -> str:
    """The memory layout of a strided tensor: ``contiguous``, ``channels_last``, ``permuted`` (dense otherwise) or
    ``sliced`` (with gaps, or elements that stand for several)."""
    if tensor.is_contiguous():
        return "contiguous"
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()]):
        return "channels_last"
    return "permuted" if is_dense(tensor) else "sliced"


@functools.cache
def _evidence() -> dict[str, Any]:
    """``proven``: operator -> calls by kind of recording, and bytes of the largest; ``layouts``: operator -> those in
    which that is proven too; ``taking``: operator -> a case in which it takes more."""
    return read_table("outputs_only.json")


def is_exact(name: str, args: Sequence[object]) -> bool:
    """True if nothing of this call is unknown, though something of others of its name is."""
    rule = _EXACT.get(name)
    return rule is not None and rule(args)
