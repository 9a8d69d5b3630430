"""An fx graph as a :class:`graphmem.plan_memory.Graph`: which storage each node makes, reads and writes into."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from graphmem.base.records import dataclass
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.callers import written_place
from graphmem.errors import GraphError
from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.sources.fx_graph.values import CALLS, Known, is_picking, known_values, tensors, whole

#: How Dynamo spells the path of a module: "L['self'].layers[0]", "getattr(L['self'].layers, '0')".
_SELF = re.compile(r"^L\['\w+'\]")
_ITEM = re.compile(r"\._modules\['([^']*)'\]|\[['\"]?([^'\"\]]*)['\"]?\]")
_GETATTR = re.compile(r"getattr\(([^()]*), '([^']*)'\)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class FxGraph:
    """A graph beside what it was made of: ``nodes[i]`` is the fx node of ``graph.nodes[i]``, ``buffers`` are those that
    each fx node's value lies in, ``values`` these values, with fake tensors."""

    graph: Graph
    nodes: tuple[fx.Node, ...]
    buffers: dict[fx.Node, tuple[int, ...]]
    values: dict[fx.Node, Any]
    source: fx.Graph
    owner: torch.nn.Module

    @cached_property
    def numbers(self) -> dict[fx.Node, int]:
        """The index of each call."""
        return {node: number for number, node in enumerate(self.nodes)}


def from_fx(
    module: fx.GraphModule | fx.Graph | torch.export.ExportedProgram,
    *example_inputs: object,
    held: Collection[str] | None = None,
) -> Graph:
    """The memory of a ``torch.fx`` graph: of ``symbolic_trace``, Dynamo, ``torch.export``, or AOTAutograd's (forward,
    backward or joint). Its nodes are the calls of the graph in their order, with operator, module and source line.

    Sizes are bytes of storages, from the tracer's own metadata, or of ``example_inputs`` (one for each placeholder,
    fake ones will do). A view is no buffer of its own. ``held`` names placeholders that belong to the caller and are
    never freed; by default all, but of graphs that take tangents the parameters and inputs (``primals_*``) only. A
    node's cost are its FLOPs by PyTorch's counter, or one for every element that it makes; what gives another result
    the next time cannot be run again. Temporary buffers inside an operator are not known. Tensors on the host count
    nothing where others lie on a device. Raises :class:`graphmem.errors.GraphError`.
    """
    return read(module, *example_inputs, held=held).graph


def read(module: Any, *example_inputs: object, held: Collection[str] | None = None) -> FxGraph:
    """:func:`from_fx`, with what the graph was made of."""
    source, owner = _parts(module)
    known = known_values(source, owner, example_inputs)
    reader = _Reader(source, owner, known, _held(source, held))
    reader.read()
    graph = Graph(tuple(reader.nodes), tuple(reader.buffers), reader.outputs)
    calls = tuple(node for node in source.nodes if node.op in CALLS)
    values = {node: one.value for node, one in known.items()}
    return FxGraph(graph, calls, reader.lies_in, values, source, owner)


def _parts(module: Any) -> tuple[fx.Graph, torch.nn.Module]:
    if isinstance(module, torch.export.ExportedProgram):
        return module.graph, module.graph_module
    if isinstance(module, fx.GraphModule):
        return module.graph, module
    if isinstance(module, fx.Graph):
        return module, module.owning_module or torch.nn.Module()
    raise GraphError(
        f"a {type(module).__name__} is no graph of torch.fx; give what torch.fx.symbolic_trace, torch.export.export or "
        "AOTAutograd makes of it"
    )


def _held(graph: fx.Graph, held: Collection[str] | None) -> frozenset[str]:
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    if held is not None:
        if unknown := set(held).difference(names):
            raise GraphError(f"held names {sorted(unknown)}, which the graph does not take; it takes {names}")
        return frozenset(held)
    if any(name.startswith("tangents_") for name in names):
        return frozenset(name for name in names if name.startswith("primals_"))
    return frozenset(names)


class _Reader:
    """Goes through the graph once and finds buffers by the storages of fake tensors."""

    def __init__(
        self, source: fx.Graph, owner: torch.nn.Module, known: dict[fx.Node, Known], held: frozenset[str]
    ) -> None:
        self._source, self._owner, self._known, self._held = source, owner, known, held
        self._on_device = any(_is_on_device(tensor) for one in known.values() for tensor in tensors(one.value))
        self._numbers: dict[fx.Node, int] = {}
        self._weights: dict[int, int] = {}  # buffers of the tensors of submodules that are called whole
        self._last_random: tuple[int, ...] = ()
        self.nodes: list[Node] = []
        self.buffers: list[Buffer] = []
        self.lies_in: dict[fx.Node, tuple[int, ...]] = {}  # the buffer of every tensor in a node's value
        self.outputs: tuple[int, ...] = ()

    def read(self) -> None:
        inputs: list[fx.Node] = []
        for node in self._source.nodes:
            if node.op == "output":
                self.outputs = self._all_of(node.all_input_nodes)
            elif node.op in CALLS:
                self._call(node)
            else:
                self._input(node, inputs)
                inputs.append(node)

    def _input(self, node: fx.Node, others: list[fx.Node]) -> None:
        """A placeholder, or a tensor of the module. Several that share a storage are one buffer."""
        is_held = node.op == "get_attr" or node.name in self._held
        found = self._by_storage(others)
        self.lies_in[node] = tuple(
            self._new(str(node.target), tensor, held=is_held)
            if (index := found.get(_storage(tensor))) is None
            else index
            for tensor in tensors(self._known[node].value)
        )

    def _call(self, node: fx.Node) -> None:
        known, read = self._known[node], self._read(node)
        if node.op == "call_module":
            read = (*read, *self._weights_of(node))
        first = len(self.buffers)
        self.lies_in[node] = self._picked(node) or self._results(node)
        makes = tuple(range(first, len(self.buffers)))
        updates = self._all_of(known.written)
        after = {self._numbers[one] for one in node.all_input_nodes if self._is_view(one)}
        if known.is_random:  # in another order each would get other numbers
            after.update(self._last_random)
            self._last_random = (len(self.nodes),)
        self._numbers[node] = len(self.nodes)
        self.nodes.append(
            Node(
                node.name,
                reads=tuple(one for one in read if one not in updates),
                makes=makes,
                updates=updates,
                cost=float(self._cost(node, makes, updates)),
                module=_module_of(node),
                source=_source_of(node),
                after=tuple(sorted(after)),
                repeatable=not known.is_random,
            )
        )

    def _read(self, node: fx.Node) -> tuple[int, ...]:
        """The buffers that must be alive. Who picks one result out of several has all of them kept, unless the several
        are at once left for it."""
        picked = self._picked(node)
        if picked:
            maker = self._numbers.get(node.args[0], len(self.nodes))
            if not any(one.makes for one in self.nodes[maker + 1 :]):
                return picked
        return self._all_of(node.all_input_nodes)

    def _results(self, node: fx.Node) -> tuple[int, ...]:
        """The buffers of what a call gives: those of its inputs that share the storage, or new ones."""
        found = self._by_storage(node.all_input_nodes)
        values = list(tensors(self._known[node].value))
        lies_in = []
        for position, tensor in enumerate(values):
            index = found.get(_storage(tensor))
            if index is None:
                index = self._declared_base(node, position)
            if index is None:
                index = self._new(node.name if len(values) == 1 else f"{node.name}[{position}]", tensor)
            found[_storage(tensor)] = index
            lies_in.append(index)
        return tuple(lies_in)

    def _picked(self, node: fx.Node) -> tuple[int, ...]:
        """The buffer of one result out of several. A program that was saved has other fake tensors for it."""
        if not is_picking(node) or not isinstance(position := node.args[1], int):
            return ()
        whole_value = self._known[node.args[0]].value
        if not isinstance(whole_value, (tuple, list)) or not -len(whole_value) <= position < len(whole_value):
            return ()
        before = sum(1 for _ in tensors(whole_value[: range(len(whole_value))[position]]))
        here = sum(1 for _ in tensors(whole_value[position]))
        return self.lies_in[node.args[0]][before : before + here]

    def _declared_base(self, node: fx.Node, position: int) -> int | None:
        """The buffer that an operator declares its result to be a view of, where fake tensors do not show it: those of
        a program that was saved are each made anew."""
        target = node.target
        if not isinstance(target, OpOverload) or position >= len(target._schema.returns):
            return None
        alias = target._schema.returns[position].alias_info
        if alias is None:
            return None
        for declared, given in zip(target._schema.arguments, node.args, strict=False):
            is_base = declared.alias_info is not None and declared.alias_info.before_set & alias.before_set
            if not (is_base and isinstance(given, fx.Node)):
                continue
            if alias.is_write or self._is_view_alone(node, given, position):
                return self.lies_in[given][0]
        return None

    def _is_view_alone(self, node: fx.Node, base: fx.Node, position: int) -> bool:
        """Whether the operator, run on the fake inputs, gives a view: some that may (``reshape``) copy if they must."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: self._known[one].value)
        try:
            result = list(tensors(node.target(*args, **kwargs)))[position]
        except Exception:  # no kernel for fake tensors: what is declared has to do
            return True
        return bool(_storage(result) == _storage(next(tensors(self._known[base].value))))

    def _new(self, name: str, tensor: torch.Tensor, held: bool = False) -> int:
        counts = not self._on_device or _is_on_device(tensor)
        self.buffers.append(Buffer(name, _bytes_of(tensor, name) if counts else 0, held))
        return len(self.buffers) - 1

    def _weights_of(self, node: fx.Node) -> list[int]:
        """Parameters and buffers of a submodule that is called whole."""
        module, found = self._owner.get_submodule(str(node.target)), []
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in self._weights:
                self._weights[id(tensor)] = self._new(f"{node.target}.{name}", tensor, held=True)
            found.append(self._weights[id(tensor)])
        return found

    def _all_of(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(index for node in nodes for index in self.lies_in.get(node, ())))

    def _by_storage(self, nodes: Sequence[fx.Node]) -> dict[object, int]:
        return {
            _storage(tensor): index
            for node in nodes
            for tensor, index in zip(tensors(self._known[node].value), self.lies_in[node], strict=True)
        }

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a call makes nothing: those that read it need it to have run, which no buffer says."""
        return node in self._numbers and not self.nodes[self._numbers[node]].makes

    def _cost(self, node: fx.Node, makes: tuple[int, ...], updates: tuple[int, ...]) -> int:
        if not makes and not updates:
            return 0
        known = self._known[node]
        if known.flops is not None:
            return known.flops
        return sum(whole(tensor.numel(), node.name) for tensor in tensors(known.value))


def _storage(tensor: torch.Tensor) -> object:
    """What tensors of one storage have in common. Those without (sparse ones) have nothing in common."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return tensor


def _bytes_of(tensor: torch.Tensor, name: str) -> int:
    try:
        size = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        raise GraphError(f"{name} is a tensor of layout {tensor.layout}, whose memory is not known") from None
    return whole(size, name)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _module_of(node: fx.Node) -> str:
    """The innermost module that calls the operator, or called the forward operator of this one, as a path."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    while (found := _GETATTR.sub(r"\1.\2", path)) != path:
        path = found
    return _ITEM.sub(r".\1\2", _SELF.sub("", path)).strip(".")


def _source_of(node: fx.Node) -> str:
    """The innermost line of the user's or a model library's code."""
    for file, line in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if place := written_place(file, int(line)):
            return place
    return ""
