"""A node as its kernel sees it (``OpKernelContext``), and the tables of rules by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from graphmem.base.records import dataclass
from graphmem.graph.model import Graph, Node, TensorSpec

#: What a kernel does with memory, in order: ``n > 0`` takes a buffer of n bytes, :data:`OUTPUTS` allocates the outputs,
#: ``-k`` gives the k-th buffer back. Buffers that are not given back go when the kernel ends, the newest first.
Steps = tuple[int, ...]
OUTPUTS = 0
ONLY_OUTPUTS: Steps = (OUTPUTS,)
FLOAT_BYTES = INT_BYTES = 4
INT64_BYTES = 8
#: First opset in which the softmax family looks at one axis only.
SOFTMAX_ONE_AXIS = 13

Rule = TypeVar("Rule", bound=Callable[..., object])


class Rules(dict[str, Rule]):
    """Rules by operator (:attr:`Node.operator`), added by a decorator: ``@rules.of("Conv", "GRU")``."""

    def of(self, *operators: str) -> Callable[[Rule], Rule]:
        """The decorated function is the rule of these operators."""

        def add(rule: Rule) -> Rule:
            self.update(dict.fromkeys(operators, rule))
            return rule

        return add


def integers(spec: TensorSpec) -> tuple[int, ...]:
    """The bound shape of a tensor."""
    return tuple(int(dimension) for dimension in spec.shape)


@dataclass(frozen=True, slots=True)
class Context:
    """A node with its tensors, by the positions of its inputs and outputs, and its attributes."""

    node: Node
    graph: Graph

    def name(self, position: int) -> str:
        """The name of an input, "" for one that is absent."""
        return self.node.inputs[position] if position < len(self.node.inputs) else ""

    def has_output(self, position: int) -> bool:
        """Whether somebody wants an output."""
        return position < len(self.node.outputs) and bool(self.node.outputs[position])

    def input(self, position: int = 0) -> TensorSpec:
        """The spec of an input that is there."""
        return self.graph.tensors[self.node.inputs[position]]

    def output(self, position: int = 0) -> TensorSpec:
        """The spec of an output that is there."""
        return self.graph.tensors[self.node.outputs[position]]

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an input that is there."""
        return integers(self.input(position))

    def output_shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an output that is there."""
        return integers(self.output(position))

    def number(self, name: str, default: int = 0) -> int:
        """An attribute that is a whole number, or a switch."""
        return int(self.node.attributes.get(name, default))

    def numbers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """An attribute that is a list of whole numbers; an empty one is the default."""
        return tuple(int(value) for value in self.node.attributes.get(name) or default)

    def text(self, name: str, default: str) -> str:
        """An attribute that is a string."""
        return as_text(self.node.attributes.get(name, default))

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return dict(self.graph.opsets).get("", 1)


def as_text(value: object) -> str:
    """A string of an attribute, which some files hold as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def softmax_copies(kernel: Context) -> Steps:
    """``math/softmax.cc`` of both providers: an axis that is not the last is brought there in a copy, and the result
    back."""
    shape = kernel.shape()
    if kernel.opset < SOFTMAX_ONE_AXIS or not shape or kernel.number("axis", -1) % len(shape) == len(shape) - 1:
        return ONLY_OUTPUTS
    return (OUTPUTS, kernel.output().nbytes, kernel.output().nbytes)
