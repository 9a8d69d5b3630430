"""Operators that a card answers otherwise than a fake run: with other operators, outputs of other sizes or layouts."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any, TypeAlias

from torch import Tensor

#: What runs in an operator's place: a function of its arguments that calls the operators a card would run. One below
#: autograd has the recorder's :class:`~graphmem.capture.values.assumed_values.Selection` as its first argument.
Decomposition: TypeAlias = Callable[..., Any]
#: A shape function of an operator for fake tensors, in place of PyTorch's own.
Shapes: TypeAlias = Callable[..., Any]
#: The result of a decomposition that leaves some calls to the kernel.
Perhaps: TypeAlias = Tensor | tuple[Tensor, ...] | NotImplementedType
