"""Which modules of a model to wrap in ``torch.utils.checkpoint``, to stay within a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graphmem.base.records import public_value
from graphmem.errors import GraphError
from graphmem.plan_memory.recompute.answer import Remat, checked_budget
from graphmem.plan_memory.recompute.steps import Problem, Profile
from graphmem.sources.fx_graph.reading import FxGraph, read

#: Elements of a list of modules, the outermost of each path.
_ELEMENT = re.compile(r"^.*?\.\d+(?=\.|$)")


@public_value(frozen=True)
class Checkpoints:
    """The ``modules`` to wrap, by their paths, and the ``plan`` that this comes to."""

    modules: tuple[str, ...]
    plan: Remat

    def __str__(self) -> str:
        return f"{self.plan}; modules: {', '.join(self.modules) or 'none'}"


def checkpoint_modules(joint: Any, budget: int, modules: Sequence[str] | None = None) -> Checkpoints:
    """The modules to wrap in ``torch.utils.checkpoint.checkpoint`` so that a step holds no more than ``budget`` bytes.

    ``joint``: a joint graph of AOTAutograd, whose nodes name their modules; ``modules``: paths to choose from, by
    default the elements of lists of modules (``blocks.3``). A wrapped module keeps its inputs, and runs forward again
    before its backward, its random numbers as before. Modules are added while the peak is too high, always what frees
    most at the peak for what it costs, and those not needed then are left out: no choice is proven best.

    Raises :class:`graphmem.errors.GraphError` for a graph without backward nodes, modules that it does not name, and a
    budget that wrapping all of them does not meet.
    """
    budget, found = checked_budget(budget), read(joint)
    steps = _Steps(found)
    candidates = _candidates(found, modules)
    plain = steps.measured(())
    if not candidates and plain.peak > budget:
        raise GraphError("no node says which module it is of; name those that may be wrapped: modules=[...]")
    chosen: list[str] = []
    best = plain
    while best.peak > budget:
        tried = {path: steps.measured((*chosen, path)) for path in candidates if path not in chosen}
        better = {path: one for path, one in tried.items() if _worth(best, one) > 0}
        if not better:
            raise GraphError(
                f"wrapping {len(chosen)} of {len(candidates)} modules comes to a peak of {best.peak} bytes, more than "
                f"{budget}, and wrapping more frees nothing"
            )
        path = max(better, key=lambda one: _worth(best, better[one]))
        chosen.append(path)
        best = better[path]
    for path in list(chosen):
        without = steps.measured([one for one in chosen if one != path])
        if without.peak <= budget:
            chosen.remove(path)
            best = without
    problem = steps.problem
    total = sum(problem.cost[number] for number in problem.order)
    plan = Remat(
        found.graph,
        problem.with_views(best.kept()),
        budget,
        plain.peak,
        best.peak,
        best.extra_cost,
        total,
        0.0,
        "checkpoint",
    )
    return Checkpoints(tuple(path for path in candidates if path in chosen), plan)


def _candidates(found: FxGraph, modules: Sequence[str] | None) -> tuple[str, ...]:
    paths = dict.fromkeys(node.module for node in found.graph.nodes if node.module)
    if modules is None:
        return tuple(dict.fromkeys(match[0] for path in paths if (match := _ELEMENT.match(path))))
    for module in modules:
        if not any(path == module or path.startswith(f"{module}.") for path in paths):
            raise GraphError(
                f"no node of this graph is of the module {module!r}; its modules: {', '.join(paths) or 'none'}"
            )
    return tuple(modules)


def _worth(before: Profile, after: Profile) -> float:
    """Bytes that a choice frees, at the peak or at as many moments as have it, for what it costs."""
    freed = before.peak - after.peak
    if not freed:  # several moments have the peak: fewer are better, too
        freed = int((before.live == before.peak).sum() > (after.live == after.peak).sum())
    return freed / max(after.extra_cost - before.extra_cost, 1.0)


class _Steps:
    """The steps of a joint graph with some modules checkpointed."""

    def __init__(self, found: FxGraph) -> None:
        self.problem = Problem(found.graph)
        tags = [node.meta.get("partitioner_tag") for node in found.nodes]
        places = [place for place, number in enumerate(self.problem.order) if tags[number] == "is_backward"]
        if not places:
            raise GraphError("the graph has no nodes of a backward pass; give a joint graph of AOTAutograd")
        self._turn = places[0]
        self._modules = [found.graph.nodes[number].module for number in self.problem.order]

    def measured(self, modules: Sequence[str]) -> Profile:
        """What is alive where these modules are checkpointed."""
        problem = self.problem
        before: dict[int, list[int]] = {}
        for module in modules:
            again = self._again(module)
            made = {buffer for number in again for buffer in problem.makes[number]}
            first = next(
                (
                    place
                    for place in range(self._turn, len(problem.order))
                    if made.intersection(problem.uses[problem.order[place]])
                ),
                None,
            )
            if first is not None:
                before.setdefault(first, []).extend(again)
        steps: list[int] = []
        for place, number in enumerate(problem.order):
            steps += before.get(place, ())
            steps.append(number)
        return Profile(problem, steps)

    def _again(self, module: str) -> list[int]:
        """The forward nodes of a module up to the last one whose result its backward needs; the module's own results,
        that others read, are kept."""
        problem = self.problem
        inside = [
            place
            for place in range(self._turn)
            if self._modules[place] == module or self._modules[place].startswith(f"{module}.")
        ]
        own = set(inside)
        again = []
        for place in inside:
            number = problem.order[place]
            users = {user for buffer in problem.makes[number] for user in problem.users[buffer]}
            if problem.graph.nodes[number].updates or any(user < self._turn and user not in own for user in users):
                continue
            again.append(number)
        while again and not any(
            user >= self._turn for buffer in problem.makes[again[-1]] for user in problem.users[buffer]
        ):
            again.pop()
        return again
