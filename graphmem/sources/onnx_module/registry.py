"""The table of ONNX operators: which function of PyTorch operators each one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graphmem.errors import CaptureError
from graphmem.graph.model import Node, TensorSpec

#: ``function(node, *inputs)``.
Function: TypeAlias = Callable[..., "Tensor | tuple[Tensor, ...]"]
AFunction = TypeVar("AFunction", bound=Function)
Default = TypeVar("Default")
#: An input at a position of settings: its values, the tensor where they are not known beforehand, or nothing.
Setting: TypeAlias = "NDArray[np.generic] | Tensor | None"

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

    function: Function
    known: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    elementwise: bool = False


#: ONNX's own operators by name; operators of other domains are not supported.
OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, known: tuple[int, ...] = (), numbers: tuple[int, ...] = (), elementwise: bool = False
) -> Callable[[AFunction], AFunction]:
    """Enter the decorated function into the table as the operators ``names``."""

    def enter(function: AFunction) -> AFunction:
        OPERATORS.update(dict.fromkeys(names, Operator(function, known, numbers, elementwise)))
        return function

    return enter


def operators(functions: Mapping[str, Function], known: tuple[int, ...] = (), *, elementwise: bool = False) -> None:
    """Enter a function for each name into the table."""
    for name, function in functions.items():
        operator(name, known=known, elementwise=elementwise)(function)


class Call(nn.Module):  # type: ignore[misc]
    """One node as a module, so that what it allocates carries its name. ``specs`` are those of its outputs, None where
    an output is left out; ``opset`` is the version of ONNX's operator set."""

    def __init__(self, node: Node, chosen: Operator, specs: tuple[TensorSpec | None, ...], opset: int) -> None:
        super().__init__()
        self.node, self.chosen, self.specs, self.opset = node, chosen, specs, opset
        self.device = torch.device("cpu")

    def forward(self, *inputs: Tensor | Setting | float) -> tuple[Tensor, ...]:
        """The outputs of the node. Raises :class:`CaptureError` for a setting that is not supported."""
        made = self.chosen.function(self, *inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        for tensor, spec in zip(outputs, self.specs, strict=False):
            if spec is not None and tuple(tensor.shape) != spec.shape:
                raise self.refused(f"PyTorch makes the shape {tuple(tensor.shape)} where ONNX's rules make {spec}")
        return outputs

    def attribute(self, name: str, default: Default) -> Default:
        """The node's attribute, or ``default``."""
        found: Default = self.node.attributes.get(name, default)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        assert self.specs[0] is not None
        return tuple(int(dimension) for dimension in self.specs[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the first output. Raises :class:`CaptureError` for one that PyTorch lacks."""
        assert self.specs[0] is not None
        name = self.specs[0].dtype
        if name not in DTYPES:
            raise self.refused(f"PyTorch computes with no tensors of {name}")
        return DTYPES[name]

    def wants(self, output: int) -> bool:
        """Whether the node's output at this position is there."""
        return output < len(self.specs) and self.specs[output] is not None

    def numbers(self, name: str, value: Setting) -> list[int] | None:
        """A list of numbers that newer operator sets give as an input and older ones as the attribute ``name``.
        Raises :class:`CaptureError` when the input is no known constant."""
        if value is None:
            given = self.node.attributes.get(name)
            return list(given) if isinstance(given, tuple) else given if given is None else [given]
        if isinstance(value, torch.Tensor):
            raise self.refused(f"its {name} is no constant of at most 1 KiB, so that it depends on data")
        return np.atleast_1d(value).tolist()  # type: ignore[no-any-return]

    def number(self, name: str, value: Setting, default: float | None = None) -> float | None:
        """The same for one number, which may be a list of it alone."""
        found = self.numbers(name, value)
        return default if found is None else found[0]

    def refused(self, why: str) -> CaptureError:
        """The error for a node that cannot be run, to be raised."""
        return CaptureError(f"{self.node}: {why}")
