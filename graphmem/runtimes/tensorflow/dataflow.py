"""TensorFlow's executor over a prepared step, as a trace.

On a GPU every kernel counts as cheap (``OpKernel::IsExpensive``, op_kernel.cc), so one thread runs them, first ready,
first run (``ExecutorState::Process``, executor.cc), and those that become ready together follow each other in the order
of edges (:mod:`graphmem.runtimes.tensorflow.propagation`). What another device sends is gone on with by another thread
(:mod:`graphmem.runtimes.tensorflow.partition`). Each edge holds a reference to the tensor's
buffer; it goes when the reader has run. An output is written over an input whose buffer nobody else holds, where the
kernel tries to (:mod:`graphmem.runtimes.tensorflow.kernels`). Variables hold the buffer that was assigned last: reading
one shares it, and adding to one writes over it if nobody else holds it (``PrepareToUpdateVariable``,
training_op_helpers.h). Constants of the card are made with their kernels and stay (constant_op.cc). Loops turn as often
as numbers on the host decide (:mod:`graphmem.runtimes.tensorflow.values`).

A step that runs eagerly is followed in the order of Python, with every intermediate result until its reader has run and
all gradients until the step returns; nothing is written over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from random import Random

from graphmem.runtimes.tensorflow import kernels
from graphmem.runtimes.tensorflow.folding import folded
from graphmem.runtimes.tensorflow.partition import ARGUMENT, begins_thread, partitioned
from graphmem.runtimes.tensorflow.propagation import Propagator, Ready
from graphmem.runtimes.tensorflow.step import Node, Step, Tensor, Variable
from graphmem.runtimes.tensorflow.values import LISTS, Buffer, Known, Memory, Value, computed, number
from graphmem.trace import Category, Trace, TraceBuilder

_ASSIGNS = frozenset(("AssignVariableOp",))
#: Names of what a gradient tape computes.
_TAPE = "gradient_tape/"
#: In the middle of recorded ones.
_LATENCY = 32
#: Operators whose output is their first input; and those of them through which loops and branches are entered and left.
_PASS_ON = frozenset(("Switch", "Identity", "Enter", "Merge", "Exit"))
_CONTROL_FLOW = frozenset(("Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond"))
_UPDATES = frozenset(("AssignAddVariableOp", "AssignSubVariableOp"))


class Executor:
    """The state of a process: variables, constants, and what the current step holds. ``uncounted``: conditions of loops
    of which nobody knows how often they turn; such a loop turns once."""

    def __init__(
        self, step: Step, builder: TraceBuilder, library: kernels.Library, order: Random | None = None
    ) -> None:
        self._step, self._builder, self._library = step, builder, library
        self._tried: set[Hashable] = set()
        self._nodes = {node.name: node for node in step.nodes}
        self._memory = Memory(lambda tensor, name: self._take(tensor, Category.ACTIVATION, name), self._free)
        self._propagator: Propagator[Value] = Propagator(step.nodes, self._memory.hold, self._memory.drop, order)
        self._elsewhere = {node.name for node in step.nodes if begins_thread(node, self._nodes)}
        self._draw = order
        self._batch: dict[str, Buffer | None] = {}
        self._variables: list[Value | None] = []
        self._constants: dict[str, Buffer] = {}
        self._phase = self._operator = 0
        self.uncounted: set[str] = set()

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _take(self, tensor: Tensor, category: Category, label: str) -> Buffer | None:
        if not tensor.bytes:
            return None
        storage = self._builder.alloc(tensor.bytes, self._operator, category, label=label)
        return Buffer(storage, tensor)

    def _free(self, buffer: Buffer) -> None:
        self._builder.free(buffer.storage, self._operator)

    def _hold(self, value: Value | None) -> Value | None:
        return self._memory.hold(value)

    def _drop(self, value: Value | None) -> None:
        self._memory.drop(value)

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
            self._variables[index] = self._hold(zeros[self._step.variables[index].tensor])
        for buffer in zeros.values():
            self._drop(buffer)

    def _initialized(self, variable: Variable) -> Value | None:
        """The value that the variable's initializer makes, the last tensor of its."""
        places: dict[int, Value | None] = {}
        value: Value | None = None
        last = next((one.place for one in reversed(variable.made) if one.tensor or one.shares is not None), None)
        for one in variable.made:
            if one.tensor is not None:
                category = variable.category if one.place == last else Category.TEMPORARY
                value = places[one.place] = self._take(one.tensor, category, variable.name)
            elif one.shares is not None:
                value = places[one.place] = self._hold(places.get(one.shares))
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
        self._begin("batch")
        given = {name: tensor for name, tensor in self._step.data.items() if _on_card(self._nodes[name], 0)}
        self._batch = {name: self._take(tensor, Category.INPUT, name) for name, tensor in given.items()}
        if iteration == 1:
            self._make_constants()
        self._kept: list[Value | None] = []
        self._fetched = {*self._step.fetched, *(self._gradients() if self._step.eager else ())}
        ready = self._propagator.begin()
        if self._step.eager:  # as Python comes to them
            for node in self._step.nodes:
                self._process(self._propagator.now(node.name))
        else:
            self._work_off(ready)
        self._begin("end of step")
        for value in (*self._kept, *self._batch.values()):
            self._drop(value)

    def _work_off(self, ready: Iterable[Ready[Value]]) -> None:
        """Run the graph. Each thread goes through what is ready in its own order, and all go on at one speed; what
        another device sends takes its time."""
        threads: deque[deque[Ready[Value] | None]] = deque([deque(ready)])
        while threads:
            if self._draw is not None:
                threads.rotate(self._draw.randrange(len(threads)))
            thread = threads.popleft()
            now = thread.popleft()
            for found in self._process(now) if now is not None else ():
                if found.node.name in self._elsewhere:
                    threads.append(deque([*[None] * self._latency(), found]))
                else:
                    thread.append(found)
            if thread:
                threads.append(thread)

    def _latency(self) -> int:
        """How many nodes a thread runs until a copy is there: 1 to 1,200 in recorded steps, as often few as many."""
        return _LATENCY if self._draw is None else int(_LATENCY ** self._draw.uniform(0, 2))

    def _gradients(self) -> set[tuple[str, int]]:
        """Tensors of the tape that others read, which ``train_step`` holds in a list until it returns."""
        return {
            pair for node in self._step.nodes if not node.name.startswith(_TAPE) for pair in node.inputs
            if pair[0].startswith(_TAPE)
        }  # fmt: skip

    def _process(self, ready: Ready[Value]) -> list[Ready[Value]]:
        """Run a node, or pass on that it is dead; those that are ready then."""
        node = ready.node
        given = [ready.inputs.get(position) for position in range(len(node.inputs))]
        dead: set[int] = set()
        outputs: list[Value | None] = []
        if ready.dead:
            self._drop_all(given)
        elif node.op in _CONTROL_FLOW:
            outputs, dead = self._pass_on(ready, given)
        else:
            outputs = self._execute(node, given)
        self._kept += [self._hold(value) for at, value in enumerate(outputs) if (node.name, at) in self._fetched]
        found = self._propagator.finish(ready, outputs, dead)
        self._drop_all(outputs)
        return found

    def _pass_on(self, ready: Ready[Value], given: Sequence[Value | None]) -> tuple[list[Value | None], set[int]]:
        """The outputs of a node that steers, and those of them that are dead. Of a condition that nobody knows the
        branch for true is taken; a loop of such a condition turns once."""
        match ready.node.op:
            case "Switch":
                taken = bool(number(given[1], True))
                self._drop(given[1])
                return [given[0] if taken == branch else None for branch in (False, True)], {not taken}
            case "Merge":
                return [next((value for value in given if value is not None), None), None], set()
            case "LoopCond" if not isinstance(given[0], Known):
                self.uncounted.add(ready.node.name)
                return [Known(ready.iteration.number == 0)], set()
        return list(given[:1]), set()

    # --- a node -------------------------------------------------------------------------------------------------------

    def _execute(self, node: Node, given: Sequence[Value | None]) -> list[Value | None]:
        """Run one node: its outputs, each held once by the node itself."""
        known = computed(node, given)
        if known is not None:
            return [known]
        if node.op == "Const":
            return [self._hold(self._constants.get(node.name))]
        if node.op == ARGUMENT:
            return [self._hold(self._batch.get(node.name))]
        if node.op == "ReadVariableOp":
            return [self._hold(self._variable(node))]
        self._begin(node.op, node.name)
        if node.op in _ASSIGNS or node.op in _UPDATES:
            self._assign(node, given)
            outputs: list[Value | None] = []
        elif node.op in LISTS:
            outputs = self._memory.list_operator(node, given, self._tensors(node, given)[0] if given else None)
        else:
            outputs = self._compute(node, given)
        self._drop_all(given)
        return outputs

    def _drop_all(self, values: Sequence[Value | None]) -> None:
        for value in values:
            self._drop(value)

    def _variable(self, node: Node) -> Value | None:
        index = self._resource(node)
        return self._variables[index] if index is not None else None

    def _resource(self, node: Node) -> int | None:
        """Which variable the node reads or writes, also where it comes through a condition."""
        name = node.inputs[0][0]
        while name in self._nodes and self._nodes[name].op in _PASS_ON:
            name = self._nodes[name].inputs[0][0]
        return self._step.resources.get(name)

    def _assign(self, node: Node, given: Sequence[Value | None]) -> None:
        index = self._resource(node)
        if index is None:
            return
        old = self._variables[index]
        if node.op in _ASSIGNS:
            self._variables[index] = self._hold(given[1])
            self._drop(old)
        elif isinstance(old, Buffer) and old.holders > 1:
            variable = self._step.variables[index]
            self._variables[index] = self._take(variable.tensor, variable.category, variable.name)
            self._drop(old)

    def _compute(self, node: Node, given: Sequence[Value | None]) -> list[Value | None]:
        """Run a kernel: its scratch and outputs are allocated in its order, the scratch is dropped. The buffers of its
        outputs, None for those that are not on the card."""
        if not node.on_card:
            return [None for _ in node.outputs]
        tensors = self._tensors(node, given)
        need = kernels.needs(node, tensors, self._library)
        scratch: list[Value | None] = [self._scratch(size, node) for size in need.before]
        outputs: list[Value | None] = []
        for position, tensor in enumerate(node.outputs):
            if not _on_card(node, position):
                outputs.append(None)
                continue
            shared = self._over(node, position, tensor, given, tensors)
            if shared is not None:
                outputs.append(self._hold(shared))
                continue
            known = tensor.shape is not None
            outputs.append(self._output(node, tensor) if known else None)
        scratch += [self._scratch(size, node) for size in need.after]
        if need.trials:
            self._try_out(node, need, tensors)
        scratch += [self._scratch(size, node) for size in need.last]
        for position, tensor in enumerate(node.outputs):
            if tensor.shape is None and _on_card(node, position):  # known to a library once its work space is there
                size = kernels.data_dependent_output(node, tensors, position, self._library)
                outputs[position] = self._output(node, Tensor("uint8", (size,)))
        if need.result is not None:
            outputs[0], scratch[need.result] = scratch[need.result], outputs[0]
        for buffer in scratch:
            self._drop(buffer)
        return outputs

    def _try_out(self, node: Node, need: kernels.Need, tensors: Sequence[Tensor]) -> None:
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

    def _tensors(self, node: Node, given: Sequence[Value | None]) -> list[Tensor]:
        """The inputs; those whose shape the graph does not have, as they are."""
        found = [self._nodes[name].outputs[position] for name, position in node.inputs]
        return [
            value.tensor if tensor.shape is None and isinstance(value, Buffer) else tensor
            for tensor, value in zip(found, given, strict=True)
        ]

    def _over(
        self, node: Node, position: int, tensor: Tensor, given: Sequence[Value | None], tensors: Sequence[Tensor]
    ) -> Value | None:
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
            same = (tensors[place].dtype, tensors[place].shape) == (tensor.dtype, tensor.shape) if buffer else False
            if same and isinstance(buffer, Buffer) and buffer.holders == 1 and buffer.tensor.bytes == tensor.bytes:
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


def trace_of(
    step: Step,
    name: str,
    iterations: int,
    library: kernels.Library,
    uncounted: set[str] | None = None,
    order: Random | None = None,
) -> Trace:
    """The trace of building the model and running its step ``iterations`` times; all sizes are unrounded bytes. The
    loops of which nobody knows how often they turn are added to ``uncounted``. ``order`` draws one of the orders that
    processes differ by."""
    builder = TraceBuilder(source=name)
    executor = Executor(partitioned(folded(step)), builder, library, order)
    executor.build()
    for iteration in range(1, iterations + 1):
        executor.run(iteration)
    if uncounted is not None:
        uncounted |= executor.uncounted
    return builder.build()
