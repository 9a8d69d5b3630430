"""The forward and the backward graph that a partitioner makes of a joint graph: as one graph again, in the order in
which training runs them, and a partitioner that keeps both within a budget."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from torch import fx

from graphmem.errors import GraphError
from graphmem.plan_memory.recompute.answer import Remat, checked_budget, checked_seconds, remat
from graphmem.sources.fx_graph.reading import from_fx
from graphmem.sources.fx_graph.writing import apply_remat
from graphmem.torch_names import private

_LOST = "joint graphs cannot be partitioned by a budget"
_CustomPartitionerFn: Any = private("torch._inductor.custom_graph_pass.CustomPartitionerFn", _LOST, object)


def join_partitions(forward: fx.GraphModule, backward: fx.GraphModule) -> fx.GraphModule:
    """One graph that runs ``forward`` and then ``backward``, as AOTAutograd's partitioners give them; what the former
    saves, the latter takes. Its inputs are the former's and the tangents, its outputs those of the user and gradients.

    ``meta["saved"]`` of the result are the names of the saved values. Tangents are there from the beginning, as all
    inputs of a graph are. Raises :class:`graphmem.errors.GraphError` where the two do not belong together.
    """
    outputs = list(_output(forward).args[0])
    saved = saved_values(forward, backward)
    joined = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    tangents = [node for node in _placeholders(backward) if node.name not in saved]
    for node in _placeholders(forward):
        copies[node] = joined.node_copy(node)
    for node in tangents:
        copies[node] = joined.node_copy(node)
    _copy_calls(joined, forward, copies)
    by_name = {node.name: node for node in outputs if isinstance(node, fx.Node)}
    for node in _placeholders(backward):
        if node.name in saved:
            copies[node] = copies[by_name[node.name]]
    _copy_calls(joined, backward, copies)
    own = outputs[: len(outputs) - len(saved)]
    gradients = list(_output(backward).args[0])
    joined.output(fx.node.map_arg([*own, *gradients], copies.__getitem__))
    joined.lint()
    module = fx.GraphModule(_owners(forward, backward), joined)
    module.meta["saved"] = saved
    return module


def saved_values(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[str, ...]:
    """The names of the values that ``forward`` gives to ``backward``, in the latter's order. Raises
    :class:`graphmem.errors.GraphError` where these two do not belong together."""
    given = {node.name for node in _output(forward).all_input_nodes}
    taken = [node.name for node in _placeholders(backward)]
    saved = tuple(name for name in taken if name in given)
    unknown = [name for name in taken if name not in given and not name.startswith(("tangents_", "bwd_"))]
    if unknown:
        raise GraphError(f"the backward graph takes {unknown[0]!r}, which the forward graph does not give")
    return saved


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _output(module: fx.GraphModule) -> fx.Node:
    return next(node for node in reversed(module.graph.nodes) if node.op == "output")


def _copy_calls(graph: fx.Graph, module: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> None:
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)


def _owners(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, object]:
    """The attributes that either graph reads."""
    found: dict[str, object] = {}
    for module in (forward, backward):
        for node in module.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                name = str(node.target)
                found[name] = module.get_submodule(name) if node.op == "call_module" else _attribute(module, name)
    return found


def _attribute(module: fx.GraphModule, name: str) -> object:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


class RematPartitioner(_CustomPartitionerFn):  # type: ignore[misc]
    """See :func:`partition_within`. ``plans`` are those of the graphs that were partitioned so far."""

    def __init__(self, budget: int, seconds: float) -> None:
        self.budget, self.seconds = budget, seconds
        self.plans: list[Remat] = []

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: object, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        default_partition = private("torch._functorch.partitioners.default_partition", _LOST)
        options.pop("compiler", None)
        gm.graph.eliminate_dead_code()
        plan = remat(from_fx(gm), self.budget, seconds=self.seconds)
        self.plans.append(plan)
        forward, backward = default_partition(apply_remat(gm, plan), joint_inputs, **options)
        return forward, backward

    def uuid(self) -> tuple[object, ...]:
        """What Inductor's caches know it by."""
        return ("graphmem", importlib.metadata.version("graphmem"), self.budget, self.seconds)


def partition_within(budget: int, *, seconds: float = 20.0) -> RematPartitioner:
    """A partitioner for AOTAutograd: the forward and backward graph hold no more than ``budget`` bytes between them, by
    :func:`graphmem.plan_memory.remat` of the joint graph.

    To set as ``torch._inductor.config.custom_partitioner_fn``, or to hand to ``aot_autograd`` as ``partition_fn``.
    Raises :class:`graphmem.errors.GraphError` while compiling where no schedule within the budget is found.
    """
    return RematPartitioner(checked_budget(budget), checked_seconds(seconds))
