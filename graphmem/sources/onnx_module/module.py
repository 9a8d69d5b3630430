"""The module made of a graph: its parameters, its buffers, and its nodes in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graphmem.errors import SourceError
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.graph.order import execution_order
from graphmem.sources.onnx_module import elementwise, layers, layout, matrices
from graphmem.sources.onnx_module.registry import DTYPES, OPERATORS, Call, Operator

#: Where the operators are entered into the table; named here so that they are imported.
FAMILIES = (elementwise, matrices, layout, layers)

#: An input of an operator: a tensor, a setting, a Python number, or nothing.
Value: TypeAlias = "torch.Tensor | NDArray[np.generic] | float | None"


@dataclass(frozen=True)
class Argument:
    """An input of a node: a tensor by name, or a value that is known beforehand. ``number`` stands in for a constant of
    one element wherever another input is a tensor of at least ``rank`` dimensions."""

    name: str = ""
    value: NDArray[np.generic] | float | None = None
    number: float | None = None
    rank: int = 0


@dataclass(frozen=True)
class Planned:
    """A node to run, its inputs, and the tensors that nobody reads after it."""

    call: Call
    arguments: tuple[Argument, ...]
    dead: tuple[str, ...]


class OnnxModule(nn.Module):  # type: ignore[misc]
    """``graph`` as a module of its inputs, in their order, that returns a tuple of its outputs.

    Floating-point initializers of rank 1 or more are parameters, without values; the running statistics of batch norms
    and all other constants are buffers. Nodes whose outputs are known already, which compute shapes, are not run.
    Values are dropped after their last reader. Raises :class:`SourceError` that lists all operators that are missing.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        _refuse_unknown(graph)
        nodes = [node for node in _in_order(graph) if any(not _is_known(graph, name) for name in node.outputs if name)]
        self._statistics = _statistics(nodes)
        self._copied = _copied_statistics(graph, nodes, self._statistics)
        nodes = [node for node in nodes if node.outputs[0] not in self._copied]
        self._planned: list[Planned] = []
        self._outputs = tuple(self._argument_of_output(name) for name in graph.outputs)
        opset = dict(graph.opsets).get("", 1)
        arguments = [self._arguments(node) for node in nodes]
        dead = _last_readers(graph, arguments)
        for index, node in enumerate(nodes):
            specs = tuple(graph.tensors[name] if name else None for name in node.outputs)
            call = Call(node, OPERATORS[node.op_type], specs, opset)
            name = node.name if node.name not in self._modules else f"{node.name}:{node.outputs[0]}"
            self._modules[name] = call
            unread = tuple(out for out in node.outputs if out and out not in dead.everything)
            self._planned.append(Planned(call, arguments[index], (*dead.after.get(index, ()), *unread)))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run every node."""
        values = dict(zip(self.graph.inputs, inputs, strict=True))
        device = next((tensor.device for tensor in (*inputs, *self.parameters())), torch.device("cpu"))
        for planned in self._planned:
            planned.call.device = device
            made = planned.call(*self._resolved(planned.arguments, values))
            values.update((name, one) for name, one in zip(planned.call.node.outputs, made, strict=False) if name)
            del made
            for name in planned.dead:
                values.pop(name, None)
        return tuple(self._tensor(argument, values) for argument in self._outputs)

    def _resolved(self, arguments: tuple[Argument, ...], values: dict[str, torch.Tensor]) -> list[Value]:
        rank = max((values[a.name].dim() for a in arguments if a.name in values), default=-1)
        return [a.number if a.number is not None and a.rank <= rank else self._tensor(a, values) for a in arguments]

    def _tensor(self, argument: Argument, values: dict[str, torch.Tensor]) -> Value:
        name = argument.name
        if not name:
            return argument.value
        if name in values:
            return values[name]
        return self._parameters[name] if name in self._parameters else self._buffers[name]

    def _argument_of_output(self, name: str) -> Argument:
        """An output of the graph, kept as a parameter or buffer where no node makes it."""
        if name in self.graph.initializers or _is_known(self.graph, name):
            self._keep(name)
        return Argument(name)

    def _arguments(self, node: Node) -> tuple[Argument, ...]:
        operator = OPERATORS[node.op_type]
        return tuple(self._argument(operator, position, name) for position, name in enumerate(node.inputs))

    def _argument(self, operator: Operator, position: int, name: str) -> Argument:
        """An input of a node: a known value or a number where the operator takes it as such, else a tensor by its name,
        which is kept as a parameter or buffer where the graph stores it."""
        values = self.graph.values
        if not name:
            return Argument()
        if name in values and position in operator.known:
            return Argument(value=values[name])
        if name in values and position in operator.numbers and values[name].ndim == 0:
            return Argument(value=values[name].item())
        if name not in self.graph.initializers and name not in values and name not in self._copied:
            return Argument(name)
        if operator.elementwise and name in values and values[name].size == 1 and not self._is_weight(name):
            self._keep(name)
            return Argument(name, number=values[name].item(), rank=values[name].ndim)
        self._keep(name)
        return Argument(name)

    def _is_weight(self, name: str) -> bool:
        spec = self.graph.tensors[name]
        is_stored = name in self.graph.initializers and name not in self.graph.constants
        return is_stored and bool(spec.shape) and dtype_of(spec).is_floating_point and name not in self._statistics

    def _keep(self, name: str) -> None:
        """Register an initializer or a known value by its name in the graph, which may hold dots."""
        if name in self._parameters or name in self._buffers:
            return
        spec = self.graph.tensors[name]
        value = self.graph.values.get(name)
        tensor = _tensor_of(spec, value)
        if self._is_weight(name):
            self._parameters[name] = nn.Parameter(tensor)
        else:
            self._buffers[name] = tensor


def _tensor_of(spec: TensorSpec, value: NDArray[np.generic] | None) -> torch.Tensor:
    dtype = dtype_of(spec)
    if value is None:
        return torch.zeros(tuple(int(d) for d in spec.shape), dtype=dtype)
    plain = np.asarray(value, dtype=np.float32) if spec.dtype == "bfloat16" else np.array(value)
    return torch.from_numpy(np.array(plain)).to(dtype)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """PyTorch's element type of a tensor. Raises :class:`SourceError` for one it does not compute with."""
    if spec.dtype not in DTYPES:
        raise SourceError(f"tensor {spec.name!r} is of {spec.dtype}, with which PyTorch does not compute")
    return DTYPES[spec.dtype]


def _refuse_unknown(graph: Graph) -> None:
    missing = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in graph.nodes
        if node.domain or (node.op_type not in OPERATORS and not all(_is_known(graph, n) for n in node.outputs if n))
    )
    if missing:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()))
        raise SourceError(
            f"{graph.name}: operators that are not translated to PyTorch: {listed}; export the model without them, or "
            "give the PyTorch model itself"
        )


def _is_known(graph: Graph, name: str) -> bool:
    return name in graph.values


def _in_order(graph: Graph) -> list[Node]:
    """The nodes in file order, which ONNX asks to be an order of execution; a file without one is put in order."""
    seen = {*graph.inputs, *graph.initializers}
    for node in graph.nodes:
        if not all(name in seen for name in node.inputs if name):
            return [graph.nodes[index] for index in execution_order(graph.nodes)]
        seen.update(node.outputs)
    return list(graph.nodes)


def _statistics(nodes: list[Node]) -> set[str]:
    """Running means and variances of batch norms, which no optimizer changes."""
    return {name for node in nodes if node.op_type == "BatchNormalization" for name in node.inputs[3:5]}


def _copied_statistics(graph: Graph, nodes: list[Node], statistics: set[str]) -> set[str]:
    """Statistics that the file writes as an ``Identity`` of another initializer, because their values were equal: those
    of an untrained model are zeros and ones, like the biases and weights beside them."""
    copies = (node for node in nodes if node.op_type == "Identity" and node.inputs[0] in graph.initializers)
    return {node.outputs[0] for node in copies} & statistics


@dataclass(frozen=True)
class _Readers:
    after: dict[int, list[str]]
    everything: set[str]


def _last_readers(graph: Graph, arguments: list[tuple[Argument, ...]]) -> _Readers:
    """For each node the names it reads last; what the graph returns stays."""
    last = {argument.name: index for index, read in enumerate(arguments) for argument in read if argument.name}
    after: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in graph.outputs:
            after.setdefault(index, []).append(name)
    return _Readers(after, {*last, *graph.outputs})
