"""A program that was refused memory and caught the error: whether it went on, and how much would have served it.

It went on where an optimizer stepped after the last refusal, or where the operator or the line that was refused was
served: it tried again with less, or skipped what was too large. Else it gave up, whatever it saved or printed then.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphmem.estimate import Refusals
from graphmem.replay import Replay
from graphmem.trace import BESIDE, EventKind, Operator, Place, Trace


def refusals_of(trace: Trace, replay: Replay) -> Refusals | None:
    """The refusals of a run that was captured within a card; ``replay`` is of the same. None where there were none."""
    positions = _positions(trace)
    if not positions:
        return None
    asked = [trace.storages[index].bytes for index in trace.refused]
    held = [int(replay.allocated_bytes[position]) for position in positions]
    first = trace.operators[int(trace.event_operators[positions[0]])]
    return Refusals(
        count=len(positions),
        first_bytes=asked[0],
        place=" at ".join(filter(None, (first.name, first.source or first.module))),
        went_on=went_on(trace),
        needed_bytes=max(map(sum, zip(asked, held, strict=True))),
        later_bytes=_most_at(trace, first, positions[-1]),
    )


def went_on(trace: Trace) -> bool:
    """True if a program went on with its work after the last request that it was refused."""
    last = _positions(trace)[-1]
    refused = trace.operators[int(trace.event_operators[last])]
    return any(_steps(trace, one) or _is_alike(trace, one, refused) for one in _served(trace, last, len(trace)))


def is_first_try(trace: Trace) -> bool:
    """True if the request that was refused first is of work that had not been done before: this operator of this module
    and line had not run, as it has where a program searches upwards for the largest batch."""
    first = _positions(trace)[0]
    refused = trace.operators[int(trace.event_operators[first])]
    return not any(_place(one) == _place(refused) for one in _served(trace, 0, first))


def _place(operator: Operator) -> tuple[str, str, str]:
    return operator.name, operator.module, operator.source


def _most_at(trace: Trace, operator: Operator, begin: int) -> int:
    """Bytes of the largest storage that was made where ``operator`` is, after an event; 0 without one."""
    same = [number for number, one in enumerate(trace.operators) if _place(one) == _place(operator)]
    part = slice(begin, len(trace))
    born = (trace.kinds[part] == EventKind.ALLOC) & np.isin(trace.event_operators[part], same)
    return max((trace.storages[index].bytes for index in trace.subjects[part][born].tolist()), default=0)


def _positions(trace: Trace) -> list[int]:
    found: list[int] = (trace.kinds == EventKind.REFUSED).nonzero()[0].tolist()
    return found


def _served(trace: Trace, begin: int, end: int) -> Iterator[Operator]:
    """The operators that got memory of the card between two events."""
    part = slice(begin, end)
    allocates = trace.kinds[part] == EventKind.ALLOC
    pairs = zip(trace.event_operators[part][allocates].tolist(), trace.subjects[part][allocates].tolist(), strict=True)
    on_card = (number for number, index in pairs if trace.storages[index].place is Place.DEVICE)
    yield from (trace.operators[number] for number in dict.fromkeys(on_card))


def _steps(trace: Trace, operator: Operator) -> bool:
    return trace.phases[operator.phase].name == "optimizer"


def _is_alike(trace: Trace, one: Operator, refused: Operator) -> bool:
    """True if both are the same operator or line, and both part of a training step, or neither."""
    beside = {trace.phases[operator.phase].name in BESIDE for operator in (one, refused)}
    return len(beside) == 1 and (one.name == refused.name or (bool(one.source) and one.source == refused.source))
