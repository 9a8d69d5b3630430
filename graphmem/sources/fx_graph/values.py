"""What each node of an fx graph gives: fake tensors, of which sizes and storages are known and no data are there.

They are those that the tracer left (``node.meta``: ``val`` of torch.export and AOTAutograd). Where example inputs are
given, or a node lacks one, the node runs on the fake tensors of its inputs, with PyTorch's own interpreter.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from graphmem.base.records import dataclass
from graphmem.capture.device.fake_tensors import shapes_unheard
from graphmem.capture.torch_internals import FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode
from graphmem.errors import GraphError, first_line

#: Operations of a graph, as opposed to its inputs, attributes and its output.
CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one node: ``value`` is a tree with fake tensors; ``flops``: by PyTorch's counter, None where it
    does not know the operator; ``is_random``: run again it gives something else; ``written``: the nodes among its
    inputs whose tensors it writes into."""

    value: Any
    flops: int | None = None
    is_random: bool = False
    written: tuple[fx.Node, ...] = ()


def known_values(graph: fx.Graph, owner: torch.nn.Module, inputs: Sequence[object]) -> dict[fx.Node, Known]:
    """What is known of every node but the output. Raises :class:`GraphError` where the size of one is not known."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if inputs and len(inputs) != len(placeholders):
        raise GraphError(f"{len(inputs)} example inputs are given; the graph takes {len(placeholders)}")
    given = dict(zip(placeholders, inputs, strict=False)) if inputs else {}
    runner = _Runner(owner, graph, _mode(graph, use_found=not inputs))
    found: dict[fx.Node, Known] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        traced = None if inputs else _traced(node)
        if node in given:
            found[node] = Known(runner.faked(given[node]))
        elif traced is not None and not _is_composite(node):
            found[node] = _declared(node, traced, found)
        elif node.op == "placeholder":
            raise GraphError(f"nothing says how large the input {node.name!r} is; give example inputs after the graph")
        else:
            found[node] = runner.run_alone(node, found)
    return found


def _is_composite(node: fx.Node) -> bool:
    """Whether a traced operator is made of others (``linear``, ``dropout`` of an exported program), which alone say
    what it costs and whether it is random."""
    return isinstance(node.target, OpOverload) and node.target._can_decompose()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of values, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def whole(size: Any, what: str) -> int:
    """A size as a number; a symbolic one is that of the inputs that the graph was traced with."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    if hint is None:
        raise GraphError(
            f"{what}: its size ({size}) depends on data; give example inputs of fixed sizes after the graph"
        )
    return int(hint)


def _traced(node: fx.Node) -> Any:
    """The value that a tracer noted: AOTAutograd and export as ``val``, Dynamo as ``example_value``."""
    return node.meta.get("val", node.meta.get("example_value"))


def _mode(graph: fx.Graph, use_found: bool) -> Any:
    """The fake mode of the values that are there, or a new one."""
    if use_found:
        for node in graph.nodes:
            for tensor in tensors(_traced(node)):
                if isinstance(tensor, FakeTensor):
                    return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


# --- of traced nodes: what their operator declares --------------------------------------------------------------------


def _declared(node: fx.Node, value: Any, found: dict[fx.Node, Known]) -> Known:
    target = node.target
    if not isinstance(target, OpOverload):
        if node.op not in CALLS or is_picking(node):
            return Known(value)
        return Known(value, is_random=True)  # an operator of higher order: nobody says what is in it
    written = []
    for declared, given in _arguments(node):
        if declared.alias_info is not None and declared.alias_info.is_write:
            written += [one for one in _nodes(given) if one not in written]
    is_random = _is_random(target, {declared.name: given for declared, given in _arguments(node)})
    return Known(value, _flops(node, value, found), is_random, tuple(written))


def is_picking(node: fx.Node) -> bool:
    """Whether the node only takes one result out of several, by its position."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Declared arguments of an operator with what is given for them."""
    for position, declared in enumerate(node.target._schema.arguments):
        if position < len(node.args) and not declared.kwarg_only:
            yield declared, node.args[position]
        elif declared.name in node.kwargs:
            yield declared, node.kwargs[declared.name]


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, lambda node: found.append(node))
    return found


#: Arguments of operators that drop at random, and the values with which they drop nothing.
_DROPS_NOTHING = (("p", 0), ("dropout", 0), ("dropout_p", 0), ("train", False), ("training", False))


def _is_random(operator: Any, given: dict[str, Any]) -> bool:
    """Whether an operator gives something else the next time. ``given`` are its arguments by name."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    values = {one.name: given.get(one.name, one.default_value) for one in operator._schema.arguments}
    return not any(name in values and values[name] == nothing for name, nothing in _DROPS_NOTHING)


def _flops(node: fx.Node, value: Any, found: dict[fx.Node, Known]) -> int | None:
    formula = flop_counter.flop_registry.get(node.target._overloadpacket)
    if formula is None:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: found[one].value)
    return whole(formula(*args, **kwargs, out_val=value), node.name)


# --- of other nodes: they run alone -----------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run: their FLOPs, and whether one is random."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: int | None = None
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}
        self.is_random = self.is_random or _is_random(func, named | (kwargs or {}))
        formula = flop_counter.flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops = (self.flops or 0) + whole(formula(*args, **(kwargs or {}), out_val=result), str(func))
        return result


class _Runner:
    """Runs single nodes on fake tensors. Real tensors of the module are read for their sizes only."""

    def __init__(self, owner: torch.nn.Module, graph: fx.Graph, mode: Any) -> None:
        self._interpreter = fx.Interpreter(owner, garbage_collect_values=False, graph=graph)
        self._mode = mode

    def faked(self, value: object) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._mode.from_tensor(value, static_shapes=True)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.faked, value))
        return value

    def run_alone(self, node: fx.Node, found: dict[fx.Node, Known]) -> Known:
        """Raises :class:`GraphError` with the node's name where it fails."""
        read = [one for one in node.all_input_nodes if one in found]
        before = [_versions(found[one].value) for one in read]
        self._interpreter.env = {one: found[one].value for one in read}
        try:
            with torch.no_grad(), shapes_unheard((get_ident(),)), self._mode, _Watch() as seen:
                value = self.faked(self._interpreter.run_node(node))
        except GraphError:
            raise
        except Exception as error:  # whatever the node's own code raises
            raise GraphError(
                f"node {node.name!r} ({node.target}) does not run on fake tensors: {first_line(error)}"
            ) from None
        written = [one for one, version in zip(read, before, strict=True) if _versions(found[one].value) != version]
        return Known(value, seen.flops, seen.is_random, tuple(written))


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors(value)]
