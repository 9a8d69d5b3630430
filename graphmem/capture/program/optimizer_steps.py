"""The optimizer steps that a program made, in their order, and whether the last ones took the same memory."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from graphmem.capture.program import iterations
from graphmem.capture.program.iterations import ALIKE_ITERATIONS, NUMBERS_BYTES
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import current_graph_task_id
from graphmem.diagnostics import Code, Diagnostic
from graphmem.units import format_bytes

#: Further steps of an optimizer that are followed until two in a row are alike: what the first step leaves to be freed
#: is gone in the fourth at the latest; steps that still differ then are of many sizes.
MOST_SETTLING = 5
#: As :func:`graphmem.capture.program.iterations.body` gives it.
_Body = tuple[list[Any], int, int]


class OptimizerSteps:
    """The steps so far. Optimizers have numbers, in the order in which they were seen; so have steps, from 0 on.
    ``wanted``: how many each optimizer makes in a run."""

    def __init__(self, wanted: int, recorder: Recorder) -> None:
        self.wanted = wanted
        self.optimizers = 0  # how many there have been
        self.run_start = 0  # the first step of the run that goes on
        self._recorder = recorder
        self._made: list[int] = []  # the optimizer of each step
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ends: dict[int, deque[int]] = {}  # optimizer -> rows of the trace where its last steps ended
        self._passes: dict[int, int] = {}  # optimizer -> the backward pass in which it stepped last, or -1
        self._doubted: set[int] = set()  # optimizers whose steps are known to differ
        self._explained: set[int] = set()  # optimizers whose steps differ with batches that are known

    def __len__(self) -> int:
        return len(self._made)

    @property
    def most(self) -> int:
        """The steps of the optimizer that made the most."""
        return max(Counter(self._made).values(), default=0)

    def since(self, step: int) -> list[int]:
        """The optimizers of the steps from that one on."""
        return self._made[step:]

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of an optimizer; a new one gets the next."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self.optimizers
            self.optimizers += 1
        return self._numbers[optimizer]

    def goes_on(self, number: int) -> bool:
        """Whether an optimizer has stepped in the backward pass that runs: parameter by parameter, as gradients come,
        it makes one step."""
        running = current_graph_task_id()
        return bool(running != -1 and self._passes.get(number) == running)

    def note(self, number: int, ends_here: bool) -> bool:
        """An optimizer has stepped; whether that is a step of its own. ``ends_here``: whether the events since its last
        step are compared with those of others."""
        ends = self._ends.setdefault(number, deque(maxlen=ALIKE_ITERATIONS))
        goes_on = self.goes_on(number)
        if ends_here:
            if goes_on and ends:
                ends.pop()
            ends.append(len(self._recorder.builder.rows))
        if not goes_on:
            self._passes[number] = current_graph_task_id()
            self._made.append(number)
        return not goes_on

    def are_made(self, since: int) -> bool:
        """Whether there are steps from that one on, and they are the last that their optimizers make in this run."""
        if since == len(self._made):
            return False
        made = Counter(self._made[min(since, self.run_start) :])
        return all(made[number] >= self.wanted for number in set(self._made[since:]))

    # --- the last steps, compared ---

    def differ(self, since: int) -> bool:
        """Whether the last two steps of an optimizer differ that stepped from that step on."""
        return any(map(self._differs, {*self._made[since:]}))

    def are_settling(self, since: int) -> bool:
        """Whether they differ, and a few more may show why."""
        made = Counter(self._made[self.run_start :])
        few = [number for number in {*self._made[since:]} if made[number] < self.wanted + MOST_SETTLING]
        return any(map(self._differs, few))

    def explain(self, since: int) -> None:
        """All batches of the steps from that one on are known: how they differ is no doubt about later ones."""
        self._explained.update(self._made[since:])

    def doubt_others(self, since: int, where: str, most_kept: int = NUMBERS_BYTES) -> None:
        """Note that a loop was left whose steps from that one on do not show what later ones take. ``most_kept``: bytes
        that each step may keep."""
        for number in sorted({*self._made[since:]} - self._doubted):
            found = self._doubt(number, where, most_kept)
            if found is not None:
                self._doubted.add(number)
                self._recorder.assumed[found] += 1

    def _doubt(self, number: int, where: str, most_kept: int) -> Diagnostic | None:
        """Why later steps of an optimizer may take more than its last two with all that was done before each: they took
        and gave back other bytes, or kept some; None where nothing says so, or there were no two after the first."""
        spans, steps = self._spans(number), self._made.count(number)
        if _differ(spans):
            return None if number in self._explained else Code.STEPS_DIFFER.about(place=where, steps=steps)
        kept = spans[-1][1] if len(spans) > 1 else 0
        if kept <= most_kept:
            return None
        return Code.STEPS_KEEP.about(place=where, steps=steps, kept=format_bytes(kept))

    def _differs(self, number: int) -> bool:
        return _differ(self._spans(number))

    def _spans(self, number: int) -> list[_Body]:
        """What the last steps of an optimizer took and gave back, with all done before each."""
        builder = self._recorder.builder
        return [iterations.body(builder, begin, end) for begin, end in pairwise(self._ends[number])]


def _differ(spans: Sequence[_Body]) -> bool:
    """Whether they took and gave back other bytes, one after the other."""
    return any(before[0] != after[0] for before, after in pairwise(spans))
