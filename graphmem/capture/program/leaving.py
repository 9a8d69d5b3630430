"""A whole program: its optimizers' steps, its loops, and when it is left.

A program is analysed for some optimizer steps, and was written for thousands. Its loops end by themselves
(:mod:`graphmem.capture.program.loop`). A loader that has trained has no batches left for the next epoch, until another
run begins: with a new optimizer, or further on in the program's own files. A loop that nobody can end, in a library, is
left by an exception behind one step more of its optimizers; the program goes on behind the statement in which it called
that library (:meth:`Leaving.go_on`), or is over.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphmem.capture.program import host_draws, iterations
from graphmem.capture.program.ahead import MOST_RUNS
from graphmem.capture.program.epochs import Epochs
from graphmem.capture.program.iterations import ALIKE_ITERATIONS
from graphmem.capture.program.loop import Loop
from graphmem.capture.program.optimizer_steps import OptimizerSteps
from graphmem.capture.program.places import Place, has_moved_on, here, is_asked_in, loops_on_stack
from graphmem.capture.record.recorder import Recorder
from graphmem.diagnostics import Code, Diagnostic
from graphmem.training.program import ItemRun, LibraryFunction, Steps

#: Epochs that a library may begin on a loader that has no batches left.
AGAIN = 3


class Left(BaseException):
    """Raised in the program to leave it; not an :class:`Exception`, which programs catch."""


class Leaving:
    """Counts optimizer steps and decides which loops are over. ``steps``: how many each optimizer makes in a run, and
    the events of a program that is followed to its end. ``ends_alike_loops``: whether loops without a backward pass end
    when their iterations are alike. ``shortens``: whether of long loops whose iterations grow evenly only some are
    followed (:mod:`.decoding`). ``opens``: functions of libraries whose loops end as the program's own do
    (:mod:`.library_loops`)."""

    def __init__(
        self, steps: Steps, recorder: Recorder, ends_alike_loops: bool = True, shortens: bool = False,
        opens: Sequence[LibraryFunction] = (),
    ) -> None:  # fmt: skip
        wanted, self.short_events = steps
        self.made = OptimizerSteps(wanted, recorder)
        self.ends_alike_loops = ends_alike_loops
        self.shortens = shortens
        self.opens = opens
        self.left_in: tuple[LibraryFunction, ...] = ()
        self.gone_on_in: tuple[LibraryFunction, ...] = ()
        self.recorder = recorder
        self.files: set[str] = set()  # the program's own, as far as their loops are rewritten
        self.calls: dict[str, set[str]] = {}  # what functions of the program's files call, by their names
        self.ends = 0  # how many loops that trained were ended
        self.repeated: Counter[str] = Counter()  # where a loop without training was left early -> how often
        self.runs: list[ItemRun] = []
        self.epochs = Epochs()
        self.leaves_unread = False  # whether batches were left that nobody could read ahead
        self.drawn: dict[str, int] = {}  # loops whose steps differed as they drew numbers -> how many there were
        self.went_on: dict[str, None] = {}  # why loops went on behind the steps that were asked for, in order
        self.remarks: dict[Diagnostic, int] = {}
        self.fetching: Loop | None = None  # the loop of the program that asks for an item, of a data loader perhaps
        self._finished: weakref.WeakKeyDictionary[Any, _Finished] = weakref.WeakKeyDictionary()  # loaders that trained
        self._runs_begun = 0  # after the first one
        self._ended = 0  # how many steps there were when a loop ended last
        self.last_steps: list[int] = []  # rows where the last steps of the loop that ended last ended
        self.last_whole = 0  # how many there would be of them
        self.trained: list[tuple[int, int]] = []  # the rows of the loops that trained themselves
        self._reopened = 0  # how often by a new optimizer
        self._leaves_since: int | None = None  # the step, once the last ones have begun of a loop that is left
        self._gone_on = 0  # how often behind a statement that was left
        self._place: Place = ()  # of the last step
        self._begun_again: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders with a second epoch
        self._loops: list[weakref.ref[Loop]] = []
        self.waited: set[str] = set()  # loops that wait for what is assumed never to come
        self.collecting: set[str] = set()  # loops that came to their ends before the first step
        self._generators: Sequence[Any] = ()
        self._looked = 0  # how often for generators

    def own_generators(self) -> Sequence[Any]:
        """The program's own generators of random numbers; they are looked for a few times alone."""
        if self._looked < MOST_RUNS:
            self._looked += 1
            self._generators = host_draws.own_generators()
        return self._generators

    def findings(self) -> dict[Diagnostic, int]:
        """What the reader must know of steps, runs and batches that were not followed."""
        found = self.remarks | self.epochs.remarks
        jumped = any(one.code is Code.NUMBERS_COMPUTED for one in self.remarks)
        if self.is_ending and (self._runs_begun or self.epochs.varied or jumped or self.leaves_unread):
            found[Code.SHORTENED.about()] = 1
        return found

    @property
    def is_ending(self) -> bool:
        """Whether a loop that trained was ended."""
        return self.ends > 0

    # --- optimizers ---

    @property
    def steps(self) -> int:
        """The steps of the optimizer that made the most."""
        return self.made.most

    @property
    def why_more(self) -> str:
        """Why there were more steps than were asked for, as far as it is known; "" where there were not."""
        if self.steps <= self.made.wanted:
            return ""
        varied = {"batches of other sizes follow": None} if self.epochs.varied else {}
        again = {"it trains several times": None} if self._runs_begun else {}
        return f"more than {self.made.wanted}: {', '.join(self.went_on | varied | again) or 'its loops ask for them'}"

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is made: what it trains on may be read from the start."""
        self.made.number(optimizer)
        if not self._finished:
            return
        self._reopened += 1
        if self._reopened <= MOST_RUNS or any(loop.is_list for loop in self.active()):
            self._finished.clear()
        else:
            self.remarks[Code.RUNS_SKIPPED.about(place="a loop of a library", followed=MOST_RUNS)] = 1

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step beyond the last that no loop has asked for is the last one. Where loops were ended there may be one
        more, of what is left over of micro-batches."""
        since = max((loop.asked for loop in self.active()), default=0)
        since = max(since, self.made.run_start, self._ended)
        number = self.made.number(optimizer)
        if (
            self._leaves_since is None
            and not self.made.goes_on(number)
            and self.made.since(since).count(number) >= self.made.wanted + self.is_ending
        ):
            # Nobody knows how many more there would be: numbers that each keeps for a log count too.
            self.made.doubt_others(0, "a loop that was left", most_kept=0)
            self._leaves_since = since

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        number = self.made.number(optimizer)
        is_elsewhere = any(loop.is_at_others for loop in self.active())
        if not self.made.note(number, ends_here=not is_elsewhere):
            return
        self.epochs.steps = len(self.made)
        self._place = here(self.files)
        loops = self.own_loops()
        if loops:
            loops[-1].steps_itself = True
        if self._leaves_since is not None:
            self._leave(number)

    def _leave(self, number: int) -> None:
        """Raises :class:`Left` behind the last step of all optimizers that take turns: in the middle, what their
        backward passes would free may be held."""
        assert self._leaves_since is not None
        made = Counter(self.made.since(self._leaves_since))
        if made[number] <= min(made.values()) or made[number] > self.made.wanted + ALIKE_ITERATIONS:
            self._leaves_since = None
            raise self.left()

    def left(self) -> Left:
        """The error that leaves the program here."""
        self.left_in = loops_on_stack()
        return Left()

    # --- loops ---

    def active(self) -> list[Loop]:
        """The loops that run, in the order in which they began."""
        loops = [loop for ref in self._loops if (loop := ref()) is not None and not loop.is_over]
        self._loops = [weakref.ref(loop) for loop in loops]
        return loops

    def own_loops(self) -> list[Loop]:
        """Those of them that are the program's own, and repeat something."""
        return [loop for loop in self.active() if loop.runs is not None and not loop.is_of_parts]

    def asking(self) -> list[Loop]:
        """The loops of the program in whose bodies a data loader is asked for a batch by hand; none where a loop of a
        library does that."""
        loops = self.own_loops()
        return loops if loops and is_asked_in({loop.frame for loop in loops}) else []

    def begin(self, loop: Loop) -> None:
        """A loop begins, and with it another run if the program has moved on since the last one."""
        is_inside = any(other.began < len(self.made) for other in self.active())
        if len(self.made) > self.made.run_start and not is_inside and has_moved_on(self._place, here(self.files)):
            self.begin_run()
        self._loops.append(weakref.ref(loop))

    def begin_run(self) -> None:
        """Another run begins."""
        self._runs_begun += 1
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Every optimizer makes its steps once more, and loaders have batches again."""
        self.made.run_start = len(self.made)
        self._finished.clear()

    def go_on(self, left: BaseException) -> None:
        """A statement was left in which a library trained, and the program goes on behind it."""
        self._gone_on += 1
        if self._gone_on > MOST_RUNS:
            raise left
        self.gone_on_in += self.left_in
        self.note_end()
        self.begin_epoch()

    def note_end(self) -> None:
        """A loop that has trained ends."""
        self.ends += 1
        self._ended = len(self.made)

    def works_beside(self, row: int) -> bool:
        """Whether since a row of the trace something was made on the device outside of the loops that trained: what it
        has left is there, and cached, when they train again."""
        return iterations.works_outside(self.recorder.builder, row, (span for span in self.trained if span[1] > row))

    # --- loaders ---

    def finish(self, loader: object, varies: bool) -> None:
        """A loader has trained. One whose batches vary has a second epoch: the memory that was cached for the sizes of
        the first is reused for others."""
        if varies and loader not in self._begun_again:
            self._begun_again.add(loader)
        else:
            self._finished[loader] = _Finished(here(self.files))

    def open(self, loader: object) -> None:
        """A pass over a loader begins: it has batches again if that is further on in the program's own files."""
        finished = self._finished.get(loader)
        if finished is None:
            return
        if has_moved_on(finished.place, here(self.files)):
            del self._finished[loader]
        elif loader not in self._begun_again and self.works_beside(self.trained[-1][1]):
            self._begun_again.add(loader)
            self.begin_epoch()

    def is_finished(self, loader: object) -> bool:
        """Whether a loader has no batches left. Raises :class:`Left` where that is asked again and again."""
        finished = None if loader is None else self._finished.get(loader)
        if finished is None:
            return False
        finished.times += 1
        self.left_in = self.left_in or loops_on_stack()
        if finished.times > AGAIN:
            raise self.left()
        return True


@dataclass
class _Finished:
    """A loader that has trained: where, and how often it was asked again."""

    place: Place
    times: int = 0
