"""A pass for ``torch.compile``: reports the peak of every graph that Inductor compiles, or refuses it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from torch import fx

from graphmem.base.records import public_value
from graphmem.errors import GraphError, one_line
from graphmem.plan_memory.recompute.answer import checked_budget
from graphmem.sources.fx_graph.annotating import memory_of_nodes
from graphmem.sources.fx_graph.reading import read
from graphmem.torch_names import private
from graphmem.units import format_bytes

_LOST = "graphs that torch.compile makes cannot be watched"
_CustomGraphPass: Any = private("torch._inductor.custom_graph_pass.CustomGraphPass", _LOST, object)
#: Dynamo and Inductor let errors of this kind through as they are.
_ShortenTraceback: Any = private("torch._dynamo.exc.ShortenTraceback", _LOST, Exception)

#: Buffers that a report names.
_LARGEST = 5


@public_value(frozen=True, slots=True)
class CompiledPeak:
    """The peak of one graph that Inductor compiles, in requested bytes, before it fuses and reuses buffers: no more
    than this many are alive at once.

    ``node``, ``module`` and ``source``: what runs then; ``largest``: names and bytes of the largest buffers alive.
    """

    peak_bytes: int
    held_bytes: int
    nodes: int
    node: str
    module: str
    source: str
    largest: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.node, self.module, self.source)))
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.largest)
        return f"peak {format_bytes(self.peak_bytes)} at {where} ({self.nodes} nodes); largest: {largest}"


class OverBudget(GraphError, _ShortenTraceback):  # type: ignore[misc]
    """A graph needs more than its budget. It is one of Dynamo's own kind too, so that it arrives as it is."""

    first_useful_frame = None

    def __init__(self, message: str) -> None:
        Exception.__init__(self, one_line(message))


class CompilePass(_CustomGraphPass):  # type: ignore[misc]
    """See :func:`compile_pass`. ``peaks`` are those of the graphs compiled so far."""

    def __init__(self, budget: int | None, report: Callable[[CompiledPeak], object] | None) -> None:
        self.budget, self.report = budget, report
        self.peaks: list[CompiledPeak] = []

    def __call__(self, graph: fx.Graph) -> None:
        peak = peak_of(graph)
        self.peaks.append(peak)
        if self.report is not None:
            self.report(peak)
        if self.budget is not None and peak.peak_bytes > self.budget:
            raise OverBudget(f"a graph that torch.compile makes needs more than {self.budget} bytes: {peak}")

    def uuid(self) -> tuple[object, ...] | None:
        """Inductor's caches keep graphs that were let through, by budget; what is to be reported is never cached."""
        return None if self.report is not None else ("graphmem", importlib.metadata.version("graphmem"), self.budget)


def compile_pass(budget: int | None = None, *, report: Callable[[CompiledPeak], object] | None = None) -> CompilePass:
    """A pass to set as ``torch._inductor.config.post_grad_custom_post_pass``: for every graph that ``torch.compile``
    makes (forward, backward, inference) it calls ``report`` with a :class:`CompiledPeak`, and raises a
    :class:`graphmem.errors.GraphmemError` where its peak is more than ``budget`` bytes. The graph is left as it is.
    Where Inductor's cache is off, or passed by as with a ``report``, PyTorch wraps the error: it is the
    ``inner_exception``.
    """
    return CompilePass(None if budget is None else checked_budget(budget), report)


def peak_of(graph: Any) -> CompiledPeak:
    """The peak of an fx graph, and where it is."""
    found = read(graph)
    memory = memory_of_nodes(found)
    node = max(memory, key=lambda one: memory[one].live_bytes)
    alive: dict[str, int] = {}
    for one, here in memory.items():
        alive.update(here.births)
        if one is node:
            break
        for name, _ in here.deaths:
            alive.pop(name, None)
    at = found.graph.nodes[found.numbers[node]] if node in found.numbers else None
    return CompiledPeak(
        memory[node].live_bytes,
        sum(one.bytes for one in found.graph.buffers if one.held),
        len(found.nodes),
        node.name,
        at.module if at else "",
        at.source if at else "",
        tuple(sorted(alive.items(), key=lambda one: -one[1])[:_LARGEST]),
    )
