"""The values on edges of a graph: memory of the card, lists of it, and small numbers that kernels keep on the host.

A list (``TensorList``) holds its elements. An operator that changes one changes it in place if nobody else holds it,
and else a copy, whose elements are the same (``ForwardInputOrCreateNewList``, list_kernels.cc).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from graphmem.runtimes.tensorflow.step import Node, Tensor


@dataclass(eq=False)
class Buffer:
    """Bytes on the card, with how many hold them; ``storage`` in the trace."""

    storage: int
    tensor: Tensor
    holders: int = 1


@dataclass(eq=False)
class TensorList:
    """Elements that were not set are None."""

    elements: list[Value | None] = field(default_factory=list)
    holders: int = 1


@dataclass(frozen=True)
class Known:
    """A number, or a truth value, on the host."""

    value: int


Value: TypeAlias = Buffer | TensorList | Known


class Memory:
    """Counts who holds what. ``take`` and ``free`` allocate and give back."""

    def __init__(self, take: Callable[[Tensor, str], Buffer | None], free: Callable[[Buffer], None]) -> None:
        self.take, self._free = take, free

    def hold(self, value: Value | None) -> Value | None:
        """One more holder."""
        if isinstance(value, (Buffer, TensorList)):
            value.holders += 1
        return value

    def drop(self, value: Value | None) -> None:
        """One holder less; the last gives it back."""
        if not isinstance(value, (Buffer, TensorList)):
            return
        value.holders -= 1
        if value.holders:
            return
        if isinstance(value, Buffer):
            self._free(value)
        else:
            for element in value.elements:
                self.drop(element)

    # --- lists --------------------------------------------------------------------------------------------------------

    def list_operator(self, node: Node, given: Sequence[Value | None], first: Tensor | None) -> list[Value | None]:
        """The outputs of an operator of lists. ``first``: the first input, as a tensor. An index that nobody knows is
        the first."""
        of = given[0] if given and isinstance(given[0], TensorList) else TensorList()
        match node.op:
            case "TensorListReserve":
                return [TensorList([None] * number(given[1], 0))]
            case "TensorListFromTensor" if first is not None and first.shape:
                row = Tensor(first.dtype, first.shape[1:])  # copied, for the sake of alignment
                return [TensorList([self.take(row, node.name) for _ in range(first.shape[0])])]
            case "TensorListGetItem":
                return [self._element(of, number(given[1], 0), node, 0)]
            case "TensorListSetItem":
                return [self._with(of, number(given[1], 0), given[2])]
            case "TensorListPushBack":
                changed = self._own(of)
                changed.elements.append(self.hold(given[1]))
                return [changed]
            case "TensorListPopBack":
                element = self._element(of, -1, node, 1)
                changed = self._own(of)
                if changed.elements:
                    self.drop(changed.elements.pop())
                return [changed, element]
            case "TensorListLength":
                return [Known(len(of.elements))]
        return [TensorList()]

    def _own(self, of: TensorList) -> TensorList:
        if of.holders == 1:
            of.holders += 1  # the operator lets its input go
            return of
        return TensorList([self.hold(element) for element in of.elements])

    def _with(self, of: TensorList, index: int, value: Value | None) -> TensorList:
        changed = self._own(of)
        changed.elements += [None] * (index + 1 - len(changed.elements))
        old, changed.elements[index] = changed.elements[index], self.hold(value)
        self.drop(old)
        return changed

    def _element(self, of: TensorList, index: int, node: Node, output: int) -> Value | None:
        """An element itself; zeros where it was not set."""
        known = -len(of.elements) <= index < len(of.elements)
        found = self.hold(of.elements[index]) if known else None
        if found is None and output not in node.host_outputs:
            found = self.take(node.outputs[output], node.name)
        return found


#: Operators whose kernels for a card work on lists alone (list_kernels.cc).
LISTS = frozenset((
    "EmptyTensorList", "TensorListReserve", "TensorListFromTensor", "TensorListGetItem", "TensorListSetItem",
    "TensorListPushBack", "TensorListPopBack", "TensorListLength",
))  # fmt: skip

_COMPUTED: Mapping[str, Callable[..., int]] = {
    "AddV2": operator.add, "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Maximum": max,
    "Minimum": min, "FloorDiv": operator.floordiv, "Less": operator.lt, "LessEqual": operator.le,
    "Greater": operator.gt, "GreaterEqual": operator.ge, "Equal": operator.eq, "NotEqual": operator.ne,
    "LogicalAnd": operator.and_, "LogicalOr": operator.or_, "LogicalNot": operator.not_, "Identity": int,
    "_Recv": int,
}  # fmt: skip


def number(value: Value | None, unknown: int) -> int:
    """A number on the host, or ``unknown``."""
    return value.value if isinstance(value, Known) else unknown


def computed(node: Node, given: Sequence[Value | None]) -> Known | None:
    """The result that a node computes on the host from numbers there; None where that is not known."""
    if node.op == "Const":
        return Known(node.value) if isinstance(node.value, int) and 0 in node.host_outputs else None
    numbers = [value.value for value in given if isinstance(value, Known)]
    if node.op not in _COMPUTED or len(numbers) != len(given):
        return None
    try:
        return Known(_COMPUTED[node.op](*numbers))
    except ZeroDivisionError:
        return None
