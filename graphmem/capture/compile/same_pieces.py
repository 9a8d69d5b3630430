"""Pieces of a model that a compiler is given one after the other, compiled once where they are the same.

vLLM cuts a model at attention and gives each piece to Inductor, whose cache of artifacts finds a layer that was
compiled before (``CompilerManager.compile``, vllm/compilation/backends.py, 0.32: by ``autograd_cache_key``, names of
nodes apart). Here there is no such cache: pieces are compared by what the compiler sees of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

#: Options of a piece that say which one it is.
_WHICH = ("graph_index", "num_graphs")


def compiled_once(
    original: Callable[..., Any],
    manager: Any,
    graph: GraphModule,
    inputs: Sequence[Any],
    *settings: Any,
    **options: Any,
) -> Any:
    """In place of ``CompilerManager.compile``: of pieces that are the same, given with the same settings, the first is
    compiled. Graphs stay as long as the manager, as the identity of what they hold is part of the key."""
    known: dict[Hashable, Any] = vars(manager).setdefault("_graphmem_pieces", {})
    named = {name: repr(value) for name, value in options.items() if name not in _WHICH}
    key = (structure(graph, inputs), tuple(map(id, settings)), tuple(sorted(named.items())))
    if key not in known:
        known[key] = original(manager, graph, inputs, *settings, **options), graph, settings
    return known[key][0]


def structure(graph: GraphModule, inputs: Sequence[Any]) -> Hashable:
    """What a compiler sees of a graph, where two that compile to the same have it equal: operators with their
    arguments, nodes by their places, and what the inputs are. Modules and tensors within it are held by identity."""
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    return tuple(_of_node(node, places, graph) for node in places), tuple(map(_of_input, inputs)), _shared(inputs)


def _of_node(node: Node, places: dict[Node, int], graph: GraphModule) -> Hashable:
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        target = ""
    elif node.op in ("get_attr", "call_module"):
        target = id(_attribute(graph, str(node.target)))
    arguments = map_arg((node.args, node.kwargs), lambda one: _Place(places[one]))
    met = node.meta.get("example_value", node.meta.get("val")) if node.op == "placeholder" else None
    return node.op, target, repr(arguments), _of_input(met)


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


class _Place:
    """A node as an argument: the place where it stands."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __repr__(self) -> str:
        return f"%{self.place}"


def _of_input(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    shape = tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.storage_offset())
    return type(value), shape, value.dtype, str(value.device), value.requires_grad


def _shared(inputs: Sequence[Any]) -> Hashable:
    """Which inputs are one storage: for each the first that is of the same."""
    first: dict[Any, int] = {}
    return tuple(
        first.setdefault(value.untyped_storage()._cdata, place) if isinstance(value, torch.Tensor) else place
        for place, value in enumerate(inputs)
    )
