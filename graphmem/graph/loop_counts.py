"""How often a loop runs that counts: ``i = i + 1`` while ``i < n``, as exporters write recurrent layers and ``for``.

Following 16,000 runs one by one would take minutes. Integers of the body that change by the same step in every run are
straight lines in the number of the run; the run at which a comparison of two lines turns false is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt
import onnx

from graphmem.base.records import dataclass
from graphmem.graph.model import Node

#: Operators that pass on the one number they are given.
_PASSING = frozenset(("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"))
#: Element types that hold every count: a Cast to another may change the number.
_WIDE = frozenset((onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE))
#: Comparisons ``x ? y``: the sign that makes it ``d < 0`` or ``d <= 0`` of the difference d, and whether 0 holds.
_COMPARISONS = {"Less": (1, False), "LessOrEqual": (1, True), "Greater": (-1, False), "GreaterOrEqual": (-1, True)}


@dataclass(frozen=True)
class Line:
    """The whole number ``start + step * run``, runs counted from 0."""

    start: int
    step: int = 0

    def at(self, run: int) -> int:
        """The number in this run."""
        return self.start + self.step * run

    def plus(self, other: Line, sign: int = 1) -> Line:
        """The sum, or with ``sign`` -1 the difference."""
        return Line(self.start + sign * other.start, self.step + sign * other.step)


@dataclass(frozen=True)
class CountingBody:
    """The body of a loop: its nodes, the inputs that it carries from run to run with the outputs that they become, and
    the numbers known before the first run (of carried inputs, and of tensors around the loop)."""

    nodes: tuple[Node, ...]
    number: str
    carried: Mapping[str, str]
    known: Mapping[str, npt.NDArray[np.generic]]

    def runs(self, condition: str) -> int | None:
        """Runs until ``condition``, an output of the body, is false, that run included; None where no line decides."""
        node = self._node(condition)
        if node is None:
            return None
        passed = node.inputs[0] if node.op_type in _PASSING else self._passed(node)
        if passed is not None:
            return self.runs(passed)
        if node.op_type == "And":
            sides = {name: self.runs(name) for name in node.inputs if not self._is_data(name)}
            return min(filter(None, sides.values()), default=None) if None not in sides.values() else None
        return self._compared(node)

    def _compared(self, node: Node) -> int | None:
        if node.op_type not in _COMPARISONS:
            return None
        left, right = map(self.line, node.inputs)
        if left is None or right is None:
            return None
        sign, holds_at_zero = _COMPARISONS[node.op_type]
        difference = left.plus(right, -1) if sign > 0 else right.plus(left, -1)
        return _first_false(difference, holds_at_zero)

    def line(self, name: str) -> Line | None:
        """The tensor ``name`` as a line; None where it is none, or is not known to be one."""
        if name == self.number:
            return Line(0, 1)
        if name in self.carried:
            start, step = self._number(name), self._step(name)
            return None if start is None or step is None else Line(start, step)
        constant = self._constant(name)
        if constant is not None:
            return Line(constant)
        node = self._node(name)
        passed = self._passed(node)
        if passed is not None:
            return self.line(passed)
        if node is None or node.op_type not in ("Add", "Sub"):
            return None
        left, right = map(self.line, node.inputs)
        return None if left is None or right is None else left.plus(right, 1 if node.op_type == "Add" else -1)

    def is_kept(self, name: str) -> bool:
        """Whether a carried input is given on as it is."""
        return self._origin(self.carried[name]) == name

    def _step(self, name: str) -> int | None:
        """By how much a carried input grows in a run."""
        if self.is_kept(name):
            return 0
        node = self._node(self._origin(self.carried[name]))
        if node is None or node.op_type not in ("Add", "Sub"):
            return None
        first, second = map(self._origin, node.inputs)
        if first == name:
            step = self._constant(second)
            return step if step is None or node.op_type == "Add" else -step
        return self._constant(first) if second == name and node.op_type == "Add" else None

    def _origin(self, name: str) -> str:
        """The tensor whose number ``name`` is given on."""
        while (passed := self._passed(self._node(name))) is not None:
            name = passed
        return name

    def _passed(self, node: Node | None) -> str | None:
        """The input whose number a node gives on: adding 0 is how Paddle's exporter writes an assignment."""
        if node is None:
            return None
        if node.op_type in _PASSING:
            return node.inputs[0] if node.op_type != "Cast" or node.attributes["to"] in _WIDE else None
        if node.op_type != "Add":
            return None
        first, second = node.inputs
        return first if self._is_zero(second) else second if self._is_zero(first) else None

    def _is_zero(self, name: str) -> bool:
        return name not in self.carried and self._constant(name) == 0

    def _is_data(self, name: str) -> bool:
        """Whether a condition is what a branch on data gives: the loop may end by it, and is taken at most."""
        node = self._node(name)
        while node is not None and node.op_type in (*_PASSING, "Not"):
            node = self._node(node.inputs[0])
        return node is not None and node.op_type == "If" and node.inputs[0] not in self.known

    def _constant(self, name: str) -> int | None:
        """The whole number that a tensor holds in every run."""
        node = self._node(name)
        if (name in self.carried and not self.is_kept(name)) or (node is not None and node.op_type != "Constant"):
            return None
        return self._number(name)

    def _number(self, name: str) -> int | None:
        """The whole number known of a tensor before the first run."""
        value = self.known.get(name)
        if value is None or value.size != 1 or not float(value.flat[0]).is_integer():
            return None
        return int(value.flat[0])

    def _node(self, name: str) -> Node | None:
        return self._made_by.get(name)

    @cached_property
    def _made_by(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs}


def _first_false(difference: Line, holds_at_zero: bool) -> int | None:
    """The runs up to the first in which ``difference < 0`` (with ``holds_at_zero`` also 0) is false, that run included;
    None if it never is."""
    most = 0 if holds_at_zero else -1
    if difference.start > most:
        return 1
    if difference.step <= 0:
        return None
    return (most - difference.start) // difference.step + 2
