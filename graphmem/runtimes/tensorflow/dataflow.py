"""TensorFlow's executor over a prepared step, as a trace.

On a GPU every kernel counts as cheap (``OpKernel::IsExpensive``, op_kernel.cc), so one thread runs them all, first
ready, first run: a node is ready when its last input is there, and those that become ready together follow each other
in the order of the graph (``ExecutorState::Process``, executor.cc; ``PropagatorState``, propagator_state.cc). Each edge
holds a reference to the tensor's buffer; it goes when the reader has run. An output is written over an input whose
buffer nobody else holds, where the kernel tries to (:mod:`graphmem.runtimes.tensorflow.kernels`). Variables hold the
buffer that was assigned last: reading one shares it, and adding to one writes over it if nobody else holds it
(``PrepareToUpdateVariable``, training_op_helpers.h). Constants of the card are made with their kernels and stay
(constant_op.cc).

A step that runs eagerly is followed in the order of Python, with every intermediate result until its reader has run and
all gradients until the step returns; nothing is written over.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphmem.runtimes.tensorflow import kernels
from graphmem.runtimes.tensorflow.folding import folded
from graphmem.runtimes.tensorflow.step import Node, Step, Tensor, Variable
from graphmem.trace import Category, Trace, TraceBuilder

_ASSIGNS = frozenset(("AssignVariableOp",))
#: Output of a node that others only wait for.
_CONTROL = -1
#: Names of what a gradient tape computes.
_TAPE = "gradient_tape/"
#: Operators whose output is their first input.
_PASS_ON = frozenset(("Switch", "Identity", "Enter"))
_UPDATES = frozenset(("AssignAddVariableOp", "AssignSubVariableOp"))


@dataclass
class Buffer:
    """Bytes on the card, with how many hold them; ``storage`` in the trace."""

    storage: int
    tensor: Tensor
    holders: int = 1


class Executor:
    """The state of a process: variables, constants, and what the current step holds."""

    def __init__(self, step: Step, builder: TraceBuilder, library: kernels.Library) -> None:
        self._step, self._builder, self._library = step, builder, library
        self._tried: set[Any] = set()
        self._nodes = {node.name: node for node in step.nodes}
        self._readers: dict[str, list[tuple[str, int]]] = defaultdict(list)  # (reader, output)
        self._after: dict[str, list[str]] = defaultdict(list)
        for node in step.nodes:
            for name, output in node.inputs:
                self._readers[name].append((node.name, output))
            for name in node.after:
                self._after[name].append(node.name)
        self._variables: list[Buffer | None] = []
        self._constants: dict[str, Buffer] = {}
        self._phase = self._operator = 0

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _take(self, tensor: Tensor, category: Category, label: str) -> Buffer | None:
        if not tensor.bytes:
            return None
        storage = self._builder.alloc(tensor.bytes, self._operator, category, label=label)
        return Buffer(storage, tensor)

    def _drop(self, buffer: Buffer | None) -> None:
        if buffer is None:
            return
        buffer.holders -= 1
        if not buffer.holders:
            self._builder.free(buffer.storage, self._operator)

    def _begin(self, op: str, name: str = "") -> None:
        self._operator = self._builder.operator(op, name, self._phase)

    # --- before the first step ----------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the variables one by one, as their initializers run in Python. The optimizer's are made with the first
        step, in one graph, in which zeros of one shape are one tensor: they share its buffer until they are updated
        (``lift_to_graph`` of initializers, polymorphic_function.py; Grappler's elimination of common subgraphs). Of
        several the last by its name stays, and they are made in the order of names, as texts (seen in recordings)."""
        self._phase = self._builder.phase(0, "build")
        slots: list[int] = []
        for index, variable in enumerate(self._step.variables):
            self._begin("Variable", variable.name)
            later = variable.category is Category.OPTIMIZER_STATE and variable.tensor.shape != ()
            self._variables.append(None if later else self._initialized(variable))
            slots += [index] if later else []
        names = {index: f"zeros_{place}" if place else "zeros" for place, index in enumerate(slots)}
        kept = {self._step.variables[index].tensor: index for index in sorted(slots, key=names.__getitem__)}
        zeros: dict[Tensor, Buffer | None] = {}
        for tensor, index in sorted(kept.items(), key=lambda pair: names[pair[1]]):
            variable = self._step.variables[index]
            self._begin("Variable", variable.name)
            zeros[tensor] = self._take(tensor, variable.category, variable.name)
        for index in slots:
            self._variables[index] = self._shared(zeros[self._step.variables[index].tensor])
        for buffer in zeros.values():
            self._drop(buffer)

    def _initialized(self, variable: Variable) -> Buffer | None:
        """The value that the variable's initializer makes, the last tensor of its."""
        places: dict[int, Buffer | None] = {}
        value = None
        last = next((one.place for one in reversed(variable.made) if one.tensor or one.shares is not None), None)
        for one in variable.made:
            if one.tensor is not None:
                category = variable.category if one.place == last else Category.TEMPORARY
                value = places[one.place] = self._take(one.tensor, category, variable.name)
            elif one.shares is not None:
                value = places[one.place] = self._shared(places.get(one.shares))
            else:
                self._drop(places.pop(one.place, None))
        return value if variable.made else self._take(variable.tensor, variable.category, variable.name)

    def _make_constants(self) -> None:
        for node in self._step.nodes:
            if node.op == "Const" and _on_card(node, 0):
                self._begin("Const", node.name)
                made = self._take(node.outputs[0], Category.BUFFER, node.name)
                if made is not None:
                    self._constants[node.name] = made

    # --- a step -------------------------------------------------------------------------------------------------------

    def run(self, iteration: int) -> None:
        """One step, from the batch to what is fetched."""
        self._phase = self._builder.phase(iteration, "train step" if self._step.training else "run")
        self._held: dict[tuple[str, int], Buffer | None] = {}
        self._copies: dict[tuple[str, int], Buffer | None] = {}
        self._begin("batch")
        batch = [self._place(name, tensor) for name, tensor in self._step.data.items()]
        if iteration == 1:
            self._make_constants()
        self._dead: set[tuple[str, int]] = set()  # what the branch that is not taken would give
        pending = {node.name: len(node.inputs) + len(node.after) for node in self._step.nodes}
        ready = deque(node.name for node in self._step.nodes if not pending[node.name])
        for source in (*self._step.resources, *self._step.data):
            ready.extend(self._activate(source, pending))
        if self._step.eager:  # as Python comes to them
            ready = deque(node.name for node in self._step.nodes)
        kept: dict[tuple[str, int], Buffer | None] = {}
        fetched = {*self._step.fetched, *(self._gradients() if self._step.eager else ())}
        while ready:
            name = ready.popleft()
            outputs = self._alive(self._nodes[name])
            for position, buffer in enumerate(outputs):
                readers = sum(output == position for _, output in self._readers[name])
                if buffer is not None:
                    buffer.holders += readers
                self._held[name, position] = buffer
                if (name, position) in fetched:
                    kept[name, position] = buffer
                else:
                    self._drop(buffer)
            if not self._step.eager:
                ready.extend(self._activate(name, pending))
        self._begin("end of step")
        for buffer in (*kept.values(), *batch):
            self._drop(buffer)

    def _gradients(self) -> set[tuple[str, int]]:
        """What ``train_step`` holds in a list until it returns: tensors of the tape that others read."""
        return {
            pair for node in self._step.nodes if not node.name.startswith(_TAPE) for pair in node.inputs
            if pair[0].startswith(_TAPE)
        }  # fmt: skip

    def _place(self, name: str, tensor: Tensor) -> Buffer | None:
        """A tensor of the batch, on the card: integers of 32 bits are copied for their readers alone."""
        buffer = self._take(tensor, Category.INPUT, name)
        if buffer is not None:
            buffer.holders += len(self._readers[name])
        self._held[name, 0] = buffer
        if tensor.dtype == "int32":
            self._drop(buffer)
            return None
        return buffer

    def _activate(self, name: str, pending: dict[str, int]) -> Iterable[str]:
        for reader in (*(reader for reader, _ in self._readers[name]), *self._after[name]):
            pending[reader] -= 1
            if not pending[reader]:
                yield reader

    def _alive(self, node: Node) -> list[Buffer | None]:
        """Run a node unless it belongs to a branch that is not taken: of every condition the one for true."""
        dead = [pair in self._dead for pair in node.inputs] + [(name, _CONTROL) in self._dead for name in node.after]
        if node.op == "Merge" and not all(dead):
            given = [self._held.get(pair) for pair in node.inputs]
            return [next((one for one, gone in zip(given, dead, strict=False) if not gone), None), None]
        if any(dead):
            for pair in node.inputs:
                self._drop(self._held.get(pair))
            self._dead.update((node.name, position) for position in range(_CONTROL, len(node.outputs)))
            return [None for _ in node.outputs]
        if node.op == "Switch":
            self._dead.add((node.name, 0))
            self._drop(self._held.get(node.inputs[1]))
            return [None, self._held.get(node.inputs[0])]
        return self._execute(node)

    # --- a node -------------------------------------------------------------------------------------------------------

    def _execute(self, node: Node) -> list[Buffer | None]:
        """Run one node: its outputs, each held once by the node itself."""
        if node.op == "Const":
            return [self._shared(self._constants.get(node.name))]
        if node.op == "ReadVariableOp":
            return [self._shared(self._variable(node))]
        self._begin(node.op, node.name)
        given = [self._held.get(pair) for pair in node.inputs]
        if node.op in _ASSIGNS or node.op in _UPDATES:
            self._assign(node, given)
            outputs: list[Buffer | None] = []
        else:
            outputs = self._compute(node, given)
        for buffer in given:
            self._drop(buffer)
        return outputs

    def _variable(self, node: Node) -> Buffer | None:
        index = self._resource(node)
        return self._variables[index] if index is not None else None

    def _resource(self, node: Node) -> int | None:
        """Which variable the node reads or writes, also where it comes through a condition."""
        name = node.inputs[0][0]
        while name in self._nodes and self._nodes[name].op in _PASS_ON:
            name = self._nodes[name].inputs[0][0]
        return self._step.resources.get(name)

    def _shared(self, buffer: Buffer | None) -> Buffer | None:
        if buffer is not None:
            buffer.holders += 1
        return buffer

    def _assign(self, node: Node, given: list[Buffer | None]) -> None:
        index = self._resource(node)
        if index is None:
            return
        old = self._variables[index]
        if node.op in _ASSIGNS:
            self._variables[index] = self._shared(given[1])
            self._drop(old)
        elif old is not None and old.holders > 1:
            variable = self._step.variables[index]
            self._variables[index] = self._take(variable.tensor, variable.category, variable.name)
            self._drop(old)

    def _compute(self, node: Node, given: list[Buffer | None]) -> list[Buffer | None]:
        if not node.on_card:
            return [None for _ in node.outputs]
        tensors = [self._tensor(pair) for pair in node.inputs]
        need = kernels.needs(node, tensors, self._library)
        scratch = [self._scratch(size, node) for size in need.before]
        outputs: list[Buffer | None] = []
        for position, tensor in enumerate(node.outputs):
            if not _on_card(node, position):
                outputs.append(None)
                continue
            shared = self._over(node, position, tensor, given, tensors)
            if shared is not None:
                outputs.append(self._shared(shared))
                continue
            known = tensor.shape is not None
            outputs.append(self._output(node, tensor) if known else None)
        scratch += [self._scratch(size, node) for size in need.after]
        if need.trials:
            self._try_out(node, need, tensors)
        scratch += [self._scratch(size, node) for size in need.last]
        for position, tensor in enumerate(node.outputs):
            if tensor.shape is None and _on_card(node, position):  # told by a library once its work space is there
                size = kernels.data_dependent_output(node, tensors, position, self._library)
                outputs[position] = self._output(node, Tensor("uint8", (size,)))
        if need.result is not None:
            outputs[0], scratch[need.result] = scratch[need.result], outputs[0]
        for buffer in scratch:
            self._drop(buffer)
        return outputs

    def _try_out(self, node: Node, need: kernels.Need, tensors: list[Tensor]) -> None:
        """Where a kernel first runs with such shapes, its algorithms are tried out one after the other."""
        key = (node.op, *tensors, *node.outputs, repr(sorted(node.attributes.items())))
        if key in self._tried:
            return
        self._tried.add(key)
        guarded = [self._scratch(size, node) for size in need.guarded]
        for size in need.trials:
            self._drop(self._scratch(size, node))
        for buffer in guarded:
            self._drop(buffer)

    def _tensor(self, pair: tuple[str, int]) -> Tensor:
        name, position = pair
        if name in self._nodes:
            return self._nodes[name].outputs[position]
        return self._step.data.get(name, Tensor("resource", ()))

    def _over(
        self, node: Node, position: int, tensor: Tensor, given: list[Buffer | None], tensors: list[Tensor]
    ) -> Buffer | None:
        """The input's buffer that an output is, or is written over."""
        if (node.op in kernels.SHARES and position < len(given)) or kernels.is_slice_of(node, tensors):
            return given[position]
        if kernels.is_input_in_other_shape(node, tensors, self._order(node)):
            return given[0]
        if node.op in kernels.BACKPROPS_OVER_INPUT:
            position -= 1
        if position or self._step.eager:  # the caller in Python still holds the inputs
            return None
        places = range(len(given)) if node.op == "AddN" else kernels.FORWARDS.get(node.op, ())
        for place in places:
            buffer = given[place] if place < len(given) else None
            same = buffer is not None and (tensors[place].dtype, tensors[place].shape) == (tensor.dtype, tensor.shape)
            if same and buffer is not None and buffer.holders == 1 and buffer.tensor.bytes == tensor.bytes:
                return buffer
        return None

    def _order(self, node: Node) -> Sequence[int] | None:
        """The permutation of a transposition, if it is a constant."""
        source = self._nodes.get(node.inputs[1][0]) if node.op == "Transpose" else None
        return source.value if source is not None and isinstance(source.value, list) else None

    def _output(self, node: Node, tensor: Tensor) -> Buffer | None:
        return self._take(tensor, _category(node), node.name)

    def _scratch(self, size: int, node: Node) -> Buffer | None:
        return self._take(Tensor("uint8", (size,)), Category.WORKSPACE, node.name)


def _on_card(node: Node, output: int) -> bool:
    return node.on_card and output not in node.host_outputs


def _category(node: Node) -> Category:
    if node.name.startswith(_TAPE):
        return Category.GRADIENT
    return Category.ACTIVATION


def trace_of(step: Step, name: str, iterations: int, library: kernels.Library) -> Trace:
    """The trace of building the model and running its step ``iterations`` times; all sizes are unrounded bytes."""
    builder = TraceBuilder(source=name)
    executor = Executor(folded(step), builder, library)
    executor.build()
    for iteration in range(1, iterations + 1):
        executor.run(iteration)
    return builder.build()
