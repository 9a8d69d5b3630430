"""What no choice of recomputations can do better than, for first runs in the order of the graph."""

from __future__ import annotations

import numpy as np

from graphmem.plan_memory.recompute.steps import Problem, Profile

#: Moments at which a bound on the cost is worked out, those with the most bytes alive: so many, and so many buffers
#: looked at for them.
_MOMENTS, _LOOKS = 400, 4_000_000


def least_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes that every schedule holds at some moment, and the node that runs then: what it uses and makes, and what
    cannot be had again."""
    live = sum(size for buffer, size in enumerate(problem.size) if problem.maker[buffer] < 0)
    left = [len(users) for users in problem.users]
    kept = [not problem.can_go(buffer) for buffer in range(len(problem.size))]
    most, where = live, -1
    for number in problem.order:
        uses, makes = problem.uses[number], problem.makes[number]
        live += sum(problem.size[buffer] for buffer in makes if kept[buffer])
        here = live + problem.scratch[number]
        here += sum(problem.size[buffer] for buffer in (*uses, *makes) if not kept[buffer])
        if here > most:
            most, where = here, number
        for buffer in uses:
            left[buffer] -= 1
        live -= sum(problem.size[one] for one in (*uses, *makes) if kept[one] and not left[one])
    at_end = sum(size for buffer, size in enumerate(problem.size) if problem.stays[buffer])
    return (at_end, -1) if at_end > most else (most, where)


def least_cost(problem: Problem, budget: int) -> float:
    """A lower bound on the extra cost: whatever is alive beyond ``budget`` at a moment, and needed later, has to be
    made again, by runs that free the most bytes for their cost (a fractional knapsack at each moment)."""
    plain = Profile(problem, problem.order)
    places = np.argsort(-plain.live[:-1], kind="stable")[: max(1, min(_MOMENTS, _LOOKS // len(problem.size)))].tolist()
    return max((_cost_at(problem, place, int(plain.live[place]) - budget) for place in places), default=0.0)


def _cost_at(problem: Problem, place: int, excess: int) -> float:
    if excess <= 0:
        return 0.0
    here = {*problem.uses[problem.order[place]], *problem.makes[problem.order[place]]}
    freed: dict[int, int] = {}
    for buffer, users in enumerate(problem.users):
        maker = problem.maker[buffer]
        may_go = maker >= 0 and problem.until[maker] > place
        if may_go and users and problem.place[maker] < place < users[-1] and buffer not in here:
            freed[maker] = freed.get(maker, 0) + problem.size[buffer]
    cost = 0.0
    for price, size in sorted((problem.cost[maker] / size, size) for maker, size in freed.items() if size):
        if excess <= 0:
            break
        cost += price * min(size, excess)
        excess -= size
    return cost
