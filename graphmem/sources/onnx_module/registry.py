"""The table of ONNX operators: which function of PyTorch operators each one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from graphmem.errors import CaptureError
from graphmem.graph.model import Node, TensorSpec

Function = TypeVar("Function", bound=Callable[..., Any])

#: graphmem's element types -> PyTorch's, spelled alike.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
        "float32", "float64", "complex64", "complex128",
    )
    if hasattr(torch, name)
}  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """How one ONNX operator is run.

    ``function(node, *inputs)`` gets a tensor for each input, None for an absent one. Inputs at the positions ``known``
    are settings (axes, shapes, pads), given as NumPy arrays; a constant of rank 0 at the positions ``numbers`` is given
    as a Python number. ``elementwise``: constants of one element are Python numbers beside a tensor, as in ``x * 2``.
    """

    function: Callable[..., Any]
    known: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()
    elementwise: bool = False


#: ONNX's own operators by name; operators of other domains are not supported.
OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, known: tuple[int, ...] = (), numbers: tuple[int, ...] = (), elementwise: bool = False
) -> Callable[[Function], Function]:
    """Enter the decorated function into the table as the operators ``names``."""

    def enter(function: Function) -> Function:
        for name in names:
            OPERATORS[name] = Operator(function, frozenset(known), frozenset(numbers), elementwise)
        return function

    return enter


class Call(nn.Module):  # type: ignore[misc]
    """One node as a module, so that what it allocates carries its name. ``specs`` are those of its outputs, None where
    an output is left out; ``opset`` is the version of ONNX's operator set."""

    def __init__(self, node: Node, chosen: Operator, specs: tuple[TensorSpec | None, ...], opset: int) -> None:
        super().__init__()
        self.node, self.chosen, self.specs, self.opset = node, chosen, specs, opset
        self.device = torch.device("cpu")

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The outputs of the node. Raises :class:`CaptureError` for a setting that is not supported."""
        made = self.chosen.function(self, *inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        for tensor, spec in zip(outputs, self.specs, strict=False):
            if spec is not None and tuple(tensor.shape) != spec.shape:
                raise self.refused(f"PyTorch makes the shape {tuple(tensor.shape)} where ONNX's rules make {spec}")
        return outputs

    def attribute(self, name: str, default: Any = None) -> Any:
        """The node's attribute, or ``default``."""
        return self.node.attributes.get(name, default)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        assert self.specs[0] is not None
        return tuple(int(dimension) for dimension in self.specs[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the first output."""
        assert self.specs[0] is not None
        return self.dtype_named(self.specs[0].dtype)

    def dtype_named(self, name: str) -> torch.dtype:
        """PyTorch's element type of a graphmem name. Raises :class:`CaptureError`."""
        if name not in DTYPES:
            raise self.refused(f"PyTorch computes with no tensors of {name}")
        return DTYPES[name]

    def wants(self, output: int) -> bool:
        """Whether the node's output at this position is there."""
        return output < len(self.specs) and self.specs[output] is not None

    def setting(self, name: str, value: Any, default: Any = None) -> Any:
        """A setting that newer operator sets give as an input and older ones as the attribute ``name``: a number or a
        list of numbers. Raises :class:`CaptureError` when the input is no known constant."""
        if value is None:
            given = self.attribute(name, default)
            return list(given) if isinstance(given, tuple) else given
        if isinstance(value, torch.Tensor):
            raise self.refused(f"its {name} is no constant of at most 1 KiB, so that it depends on data")
        return value.tolist()

    def refused(self, why: str) -> CaptureError:
        """The error for a node that cannot be run, to be raised."""
        return CaptureError(f"{self.node}: {why}")
