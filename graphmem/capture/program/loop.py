"""One loop of a program, and when it ends.

A program whose loops, by their lengths, take few events is followed to its end. Of others a loop ends at its top, so
that what follows it (evaluation, generation, saving) still runs:

- a loop *has trained* when an optimizer stepped in it, and ends when every optimizer that stepped in it has made its
  steps (:data:`graphmem.training.program.OPTIMIZER_STEPS`), and some more where the last two differ though their
  batches do not, or where a loader that is read ahead would end among the micro-batches of a step. Of the batches that
  it has not come to, those that are larger follow (:mod:`graphmem.capture.program.epochs`);
- a loop over numbers, or that counts them, then goes on at those *others* at which its body tests something else, or
  that a library is told;
- a loop that is a *list of runs*, as it makes an optimizer or its items decide how it trains, goes on with its items,
  in each of which optimizers make their steps anew (:mod:`graphmem.capture.program.runs`);
- a loop of forward passes *without* a backward pass ends when three iterations in a row were alike: the same bytes
  taken and given back in the same order, and nothing kept on the device. One that keeps something there goes on to its
  end. What it collects on the host is remembered: were that put on the device, too little of it would be there. One
  that may yet train, by what it calls (:mod:`graphmem.capture.program.training_calls`), goes on until it does.
- a loop that *searches*, by handling errors of memory in its iterations, goes on after such steps with its optimizers'
  steps counted anew, until two iterations took as much memory: batch size finders train with every size they try;
- a ``while`` loop that takes elements away until none is left (non-maximum suppression) *waits*, where nobody knows how
  many go and all are assumed to stay. It ends when that many iterations have changed nothing.

Loops are the ``for`` and ``while`` loops of the program's own files (:mod:`graphmem.capture.program.loops`) and the
iterators of data loaders, but where a loop of the program asks for each batch by hand (``next(batches)``): it ends at
its own top.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphmem.capture.program import host_draws, iterations
from graphmem.capture.program.counters import Counter
from graphmem.capture.program.epochs import Rest
from graphmem.capture.program.iterations import ALIKE_ITERATIONS, MOST_IN_TURN, MOST_REPEATED, NUMBERS_BYTES
from graphmem.capture.program.optimizer_steps import MOST_SETTLING
from graphmem.capture.program.places import innermost
from graphmem.capture.program.runs import Runs
from graphmem.capture.program.training_calls import come_to_training
from graphmem.diagnostics import Code
from graphmem.training.program import ItemRun
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.capture.program.leaving import Leaving

#: Sizes that a search tries, as many as Lightning's tuner by default; more are batches of many lengths.
MOST_TRIALS = 25
#: Steps that still differ when they should have settled are of many sizes; they are followed to the loop's end if those
#: are no more events than these (some seconds).
MOST_DIFFERING_EVENTS = 30_000
#: Steps that are followed of a loop whose body draws random numbers, which may be sizes, if they are few events too.
MOST_DRAWN = 24
#: Steps of a loop over batches that are made on the card as it asks for them, which nobody can read ahead.
MOST_UNREAD = 200
#: Of them such as differ from the one before: a smaller last batch, and one more.
MOST_UNLIKE = 2
#: Iterations in a row that select all of as many elements, until a loop waits for them to become fewer.
MOST_WAITING = 256
#: Iterations without steps that are followed though they are alike, of a loop that collects what is trained with.
MOST_COLLECTED = 1_000


class Loop:
    """One run of one loop, from its beginning to its end. ``calls``: the names of what it calls; ``runs``: of a loop of
    the program's own files, its items; ``rest``: the batches that it has not come to, if it reads any."""

    def __init__(
        self,
        leaving: Leaving,
        where: str,
        searches: bool = False,
        calls: tuple[str, ...] = (),
        runs: Runs | None = None,
        rest: Rest | None = None,
    ) -> None:
        self._leaving, self._recorder = leaving, leaving.recorder
        self.where = where
        self.runs, self.rest = runs, rest
        self.frame = innermost() if runs is not None else 0  # the function that it is a loop of
        self.is_over = False
        self.is_ending = False  # nothing follows but what is left of an epoch
        self.has_trained = self.is_list = self.steps_itself = self.is_fed = False
        self.began = self.asked = self._since = len(leaving.made)
        self._calls = calls
        self._clock = leaving.epochs.clock
        self._from_ahead = 0  # iterations after its last batches were read, for those that a reader had read before
        self._varied: float | None = leaving.epochs.varied  # None in the second epoch
        self._smaller = leaving.epochs.smaller
        self._left: int | None = 0  # items after this one, None where nobody knows
        self._marks: deque[int] = deque(maxlen=2 * MOST_IN_TURN + 1)  # rows where the last iterations, or steps, ended
        self._iterations = self._iterations_since = self._items = 0  # between the last two, since, and all
        self._trials_left = MOST_TRIALS if searches else 0
        self._first = len(self._recorder.builder.storage_bytes)
        self._first_row = len(self._recorder.builder.rows)
        self._bodies: list[Any] = []  # what the last iterations did, as long as they were alike
        self._peaks: list[int] = []  # of iterations with a step of the loop's own
        self._on_host: deque[int] = deque(maxlen=ALIKE_ITERATIONS)  # bytes that the last iterations left there
        self.is_of_parts = self._ends_itself = self.is_at_others = False
        self._goes_to_sizes = False  # of numbers for which the body computes others
        self._completing = 0  # iterations that completed the micro-batches of a last step
        self._grown = self._rested = 0  # how often it went on as it grows, and the last iterations that kept nothing
        self._waited = 0  # iterations in a row that selected all of as many elements
        self._selected: tuple[int, object] = (0, None)  # how often elements were selected, and which the last time
        self._is_followed = False  # to its end, as it is short
        self._ends = leaving.ends
        self._unlike = 0  # steps over batches of the card that differed from those before
        self._has_drawn = False  # whether the body of an iteration drew random numbers
        self._drawn: object = None  # what :meth:`_draws` said when it began; None where nobody asks
        self._generators: Sequence[Any] = ()  # the program's own, as soon as the loop makes steps
        self._begin_iteration()
        leaving.begin(self)

    def end_with(self, other: Loop) -> None:
        """The loop that reads this one's items is ending."""
        self.is_ending |= other.is_ending
        self.has_trained |= other.has_trained

    def never_ends(self) -> None:
        """The loop is not one of repetitions: its items decide its length."""
        self.is_of_parts = True

    def _begin_iteration(self) -> None:
        self._top = self._now()
        self._step, self._optimizers = len(self._leaving.made), self._leaving.made.optimizers

    def begin_body(self) -> None:
        """The item of an iteration is there: what is drawn from here on, its body draws. Of loops without steps, which
        may have a million items, nobody asks."""
        if not self._generators and (self.steps_itself or (self._items < 2 and self._may_train())):
            self._generators = self._leaving.own_generators()
        self._drawn = self._draws() if self.runs and (self.steps_itself or self._items < 2) else None

    def _draws(self) -> tuple[Any, ...]:
        """What changes when random numbers of the host are drawn that may be sizes: by Python or numpy, or by PyTorch
        and then read."""
        return self._recorder.values.host_draws_read, *host_draws.count(self._generators)

    def _now(self) -> tuple[int, int, int]:
        phases = self._recorder.phases
        return len(self._recorder.builder.rows), phases.backward_passes, phases.forward_passes

    def fetch(self, items: Iterator[Any]) -> object:
        """The next of the loop's items; data loaders that are asked for it know this loop."""
        leaving = self._leaving
        outer, leaving.fetching = leaving.fetching, self
        try:
            return next(items)
        finally:
            leaving.fetching = outer

    # --- the top of the loop ---

    def goes_on(self, left: int | None = None) -> bool:
        """Asked at the top, before every iteration: whether there is one more; ``left``: how many there would be, 0 if
        it ends by itself, None where nobody knows."""
        self._ends_itself, self._left = left == 0, left
        if self.steps_itself and self._drawn is not None:
            self._has_drawn |= self._drawn != self._draws()
        if self.is_of_parts:
            return True
        if self.is_over or not self._wants_more():
            self.end()
            return False
        self.asked = len(self._leaving.made)
        self._left, self._items = left and left - 1, self._items + 1
        self._begin_iteration()
        self.begin_body()
        return True

    def end(self) -> None:
        """The loop is over."""
        leaving = self._leaving
        if not self.is_over and self.began < len(leaving.made) and (self.runs is None or self.steps_itself):
            leaving.trained.append((self._first_row, len(self._recorder.builder.rows)))
        if not (self.is_over or self.is_ending) and self.steps_itself and len(self._marks) >= ALIKE_ITERATIONS:
            leaving.last_steps = list(self._marks)  # it ends by itself: the next item was not there
            leaving.last_whole = max(1, (self._items - 1) // self._iterations)
        if not (self.is_over or self.is_ending) and self.steps_itself and self.rest and self.rest.is_on_device:
            leaving.made.explain(self.began)  # all its batches were there
        if not self.is_over and self.has_trained:  # behind the larger batches, of which one may be read ahead
            leaving.note_end()
        self.is_over = True

    def _wants_more(self) -> bool:
        if self.runs is None and any(loop.is_elsewhere for loop in self._leaving.active()):
            return True
        if self.is_ending:
            return self._has_batches() or self._takes_those_ahead()
        self._note_peak()
        self._note_end_of_step()
        if self._waits_in_vain():
            return False
        if self._was_run():
            return self._goes_to_next_run()
        if self._leaving.made.are_made(self._since):
            return self._goes_on() or self._end_training()
        if self._leaving.ends_alike_loops and self._repeats() and not self._may_train():
            return self._collects() or self._end_alike()
        return True

    def _collects(self) -> bool:
        """Whether the loop goes on to its end, of few events, as a loop around it trains with what it collects: games
        that are played before the first step, and behind that the same loop again."""
        leaving, left = self._leaving, self._left
        if leaving.made:
            collects = self.where in leaving.collecting
        else:
            around = (loop for loop in leaving.active() if loop is not self and loop.runs is not None)
            collects = any(loop._may_train() for loop in around)
        events = max(self._now()[0] - self._top[0], MOST_DIFFERING_EVENTS // MOST_COLLECTED)
        if not (collects and self.runs) or max(self._items, left or 0) * events > MOST_DIFFERING_EVENTS:
            return False
        leaving.collecting.add(self.where)
        return True

    @property
    def is_elsewhere(self) -> bool:
        """Whether the loop goes on at numbers that are not the next."""
        return (self.is_at_others or self._goes_to_sizes) and not self.is_ending

    def _goes_on(self) -> bool:
        """Whether the loop goes on though its optimizers have made their steps; why is noted."""
        ways = (
            (self._is_of_short_program, "it is short"),
            (self._tries_another_size, "a search tries other sizes"),
            (self._settles, "its steps differ"),
            (self._goes_to_other_sizes, "later steps compute other sizes"),
            (self._ends_soon, "its steps differ"),
            (self._draws_on, "its steps draw random numbers"),
            (self._reads_on, "its batches are made on the card"),
            (self._completes_step, "micro-batches of a step had been read"),
        )
        found = next((why for goes_on, why in ways if goes_on()), None)
        if found is not None:
            self._leaving.went_on[found] = None
        return found is not None

    def _is_of_short_program(self) -> bool:
        """Whether all iterations of the program's loop, and of those around it, are few events. A loop that was found
        to be short stays so, though later iterations may be longer; one in which another was left is not, though few
        events of it are there."""
        loop, leaving = self._of_program(), self._leaving
        if loop is None or loop.is_at_others:
            return False
        if not loop._is_followed and loop._ends == leaving.ends:
            loop._is_followed = loop._all_events(loop is self) <= leaving.short_events
        return loop._is_followed

    def _all_events(self, is_at_top: bool) -> float:
        """The events of all iterations of the loop, in those that are left of the loops around it; infinity where
        nobody knows. ``is_at_top``: whether an iteration of the loop has ended."""
        events = self._events()
        for loop in self._leaving.own_loops():
            left = loop._iterations_left(loop is self and is_at_top)
            if left is None:
                return math.inf
            events *= left + (loop._items if loop is self else 1)
            if loop is self:
                break
        return events

    def _settles(self) -> bool:
        """Whether a loop of the program's own, with its steps in itself, goes on because the last of them differ, and
        not by their batches; a loader's loop does as the one that asks it. Libraries count their steps themselves."""
        loop = self._of_program()
        return loop is not None and loop._may_differ() and loop._leaving.made.are_settling(loop._since)

    def _ends_soon(self) -> bool:
        """Whether a loop whose last steps differ, and take no turns, goes on as the rest of it would be few events."""
        loop, leaving = self._of_program(), self._leaving
        if loop is None or loop._left is None or len(loop._marks) < ALIKE_ITERATIONS or not loop._may_differ():
            return False
        if loop._left * loop._events() > MOST_DIFFERING_EVENTS or not leaving.made.differ(loop._since):
            return False
        return not iterations.in_turn(self._recorder.builder, loop._marks)

    def _draws_on(self) -> bool:
        """Whether a loop whose body draws numbers (``size = random.choice(sizes)``) goes on, to see what it does."""
        loop = self._of_program()
        return loop is not None and loop._has_drawn and loop._may_differ() and loop._is_short(MOST_DRAWN)

    def _reads_on(self) -> bool:
        """Whether a loop over batches that are made on the card goes on to its end, as the last may be smaller; where
        that is too far, the answer says that steps were left out."""
        loop = self._of_program()
        if loop is None or not any(rest.is_on_device for rest in loop._rests()) or not loop._may_differ():
            return False
        loop._unlike += self._leaving.made.differ(loop._since)
        if loop._unlike > MOST_UNLIKE:  # which is in doubt
            return False
        goes_on = loop._is_short(MOST_UNREAD)
        self._leaving.leaves_unread |= not goes_on
        return goes_on

    def _completes_step(self) -> bool:
        """Whether a loader goes on that is read ahead of its batches' use, as accelerate reads it: it would end among
        the micro-batches of a step, whose gradients stayed."""
        if self.runs is not None or self._completing >= self._iterations or not self._items % self._iterations:
            return False
        self._completing += 1
        return True

    def _is_short(self, most: int) -> bool:
        """Whether the loop has made fewer than ``most`` steps beyond those that are wanted, of few events."""
        more = self._items - self._leaving.made.wanted
        return more < most and more * self._events() <= MOST_DIFFERING_EVENTS

    def _events(self) -> int:
        """The events of an iteration: the last one, or, where steps take several, one of the last step's."""
        if self.steps_itself and len(self._marks) > 1:
            return (self._marks[-1] - self._marks[-2]) // self._iterations
        return self._now()[0] - self._top[0]

    def _doubt_drawn(self) -> None:
        """Steps behind the first two that had other peaks than each other, in a loop that draws numbers: those that are
        left out, of this loop or of one around it, may have others again."""
        loop, leaving = self._of_program(), self._leaving
        if loop is not None and loop._has_drawn and len({*loop._peaks[2:]}) > 1:
            leaving.drawn[self.where] = len(loop._peaks)
        if not self._ends_itself:
            for where, steps in leaving.drawn.items():
                self._recorder.assumed[Code.STEPS_DIFFER.about(place=where, steps=steps)] += 1
            leaving.drawn.clear()

    def _of_program(self) -> Loop | None:
        """This loop, or the one that asks a loader for its batches, if it is the program's own."""
        loop = self if self.runs is not None else self._leaving.fetching
        return None if loop is None or loop.runs is None else loop

    def _may_differ(self) -> bool:
        """Whether the loop's own steps would go on, and their batches do not explain what differs."""
        if not self.steps_itself or self._ends_itself or self._items < self._leaving.made.wanted or self.is_at_others:
            return False
        return not any(rest.differs for rest in self._rests())

    def _goes_to_other_sizes(self) -> bool:
        """Whether a loop over numbers whose last steps differ goes on with those of which its body computes other
        values: a context that grows with the steps, up to its largest."""
        leaving, runs = self._leaving, self.runs
        if runs is None or not self._may_differ() or not (runs.jumped or leaving.made.differ(self._since)):
            return False
        goes_on = runs.go_to_others() or any(one.go_to_sized(self._left_of(one)) for one in runs.counters)
        self._goes_to_sizes = goes_on
        if runs.jumped:
            leaving.remarks[Code.NUMBERS_COMPUTED.about(place=self.where, followed=runs.jumped)] = 1
        return goes_on

    def _end_training(self) -> bool:
        """The loop has trained; whether larger batches follow, or a second epoch of batches that vary."""
        leaving = self._leaving
        if self.runs is not None and not self.steps_itself and self._varied is not None:
            varies, self._varied = self._varied < leaving.epochs.varied, None
            if not varies and (leaving.works_beside(self._top[0]) or self._follows_smaller()):
                leaving.begin_epoch()
                self._since = len(leaving.made)
                return True
            if varies:
                return True
        if self._goes_on_growing():
            leaving.went_on["it keeps more memory from epoch to epoch"] = None
            leaving.begin_epoch()
            self._since = len(leaving.made)
            return True
        if self._goes_to_others():
            leaving.went_on["later steps test something else"] = None
            return True
        self.is_ending = self.has_trained = True
        has_batches = self._has_batches()
        if not self.is_at_others:
            self._conclude()
        leaving.note_end()
        return has_batches or self._takes_those_ahead()

    def _takes_those_ahead(self) -> bool:
        """Whether batches that were read before the loop began are still to come to its body: a reader of the program
        is ahead of it by so many (``while batch is not None: ...; batch = reader.next()``)."""
        if not self.steps_itself:
            return False
        self._from_ahead += 1
        return self._from_ahead <= max((rest.ahead_of(self._clock) for rest in self._rests()), default=0)

    def _follows_smaller(self) -> bool:
        """Whether a step of the next epoch comes behind one with a smaller last batch, which has cut up other blocks,
        and an epoch is few events; of longer ones the answer says that steps were left out."""
        if self._ends_itself or self._smaller == self._leaving.epochs.smaller:
            return False
        is_short = self._now()[0] - self._top[0] <= MOST_DIFFERING_EVENTS
        self._leaving.leaves_unread |= not is_short
        return is_short

    def _goes_on_growing(self) -> bool:
        """Whether a loop around training goes on with its next item, as one of the last, which was not the first, has
        left memory behind on the device: weights that are collected epoch by epoch."""
        runs, builder = self.runs, self._recorder.builder
        if runs is None or self.steps_itself or self.is_fed or self._items < 2:
            return False
        kept = iterations.body(builder, self._top[0])[1]
        self._rested = 0 if kept > NUMBERS_BYTES else self._rested + 1
        if not runs.has_next or self._rested >= (MOST_SETTLING if self._grown else 1):
            return False
        self._grown += 1
        if self._grown > MOST_REPEATED:
            if self._rested:
                return False
            steps = len(self._leaving.made)
            doubt = Code.STEPS_KEEP.about(place=self.where, steps=steps, kept=format_bytes(kept))
            self._recorder.assumed[doubt] = 1
            return False
        runs.go_to_next()
        return True

    def _conclude(self) -> None:
        """The last iterations show what the others take."""
        lacking = self._repeat()
        if not self._ends_itself:
            are_known = any(rest.is_known and rest.differs for rest in self._rests())
            most_kept = NUMBERS_BYTES
            if lacking is not None and self.runs is not None:  # those that are written have all that each keeps
                most_kept = 0 if lacking else sys.maxsize
            if are_known:
                self._leaving.made.explain(self._since)
            self._leaving.made.doubt_others(self._since, self.where, most_kept)
        self._doubt_drawn()

    def _goes_to_others(self) -> bool:
        """Whether numbers follow at which the loop does what it has not done yet."""
        runs = self.runs
        if runs is None or (self.is_fed and not self.steps_itself):
            return False
        is_counting = self.steps_itself and any(one.go_to_tested(self._left_of(one)) for one in runs.counters)
        if not is_counting and not runs.go_to_tested(self.steps_itself):
            return False
        if self.is_fed and not self._has_spares(runs.count_ahead * max(1, self._iterations)):
            return False
        if not self.is_at_others and self.steps_itself:
            self._conclude()
            self._leaving.note_end()
        self.is_at_others = self.steps_itself
        if not self.steps_itself:
            self._leaving.begin_epoch()
            self._since = len(self._leaving.made)
        return True

    def _has_spares(self, count: int) -> bool:
        """Whether there are batches for steps at numbers that are not the next, of which ``count`` were chosen."""
        rests = self._rests()
        for rest in rests:
            rest.spare(count)
        return any(rest.spares or not rest.is_known for rest in rests)

    def _left_of(self, counter: Counter) -> int | None:
        """How often loops that go on would count a number on; None where nobody knows."""
        loops = [loop for loop in self._leaving.active() if loop.runs is not None]
        inside = loops.index(self) if self in loops else 0
        found = 0
        for loop in loops[max(0, inside - counter.around) : inside + 1]:
            left = loop._iterations_left(loop is self)
            if left is None:
                return None
            found = found * (loop._items + left) + left
        return found * counter.times // max(1, self._items)

    def _iterations_left(self, is_at_top: bool) -> int | None:
        """How many iterations follow the one that runs, or, at the loop's top, the last; None where nobody knows."""
        if self._left is None or not self.is_fed:
            return self._left
        return self._left + (not is_at_top) - self._items  # loaders give their length

    def _repeat(self) -> int | None:
        """Write the last step again, as often as it would follow: in this loop, or in the one that this one begins
        again and again, doing nothing beside. How many are not written then, None where nobody knows."""
        leaving, rests = self._leaving, self._rests()
        is_bound = self.is_fed or self._left is None  # else batches are asked for by hand, or by loops in it
        known = max((rest.left for rest in rests if rest.is_known and is_bound), default=self._left)
        left = MOST_REPEATED * self._iterations if known is None else known
        if len(self._marks) >= ALIKE_ITERATIONS:
            marks, times, whole = list(self._marks), left // self._iterations, self._items // self._iterations
        else:
            marks, times, whole = leaving.last_steps, left * leaving.last_whole, 0
            if leaving.works_beside(self._top[0]):
                known, times = None, 0
        if not marks or any(rest.varies for rest in rests):
            return None
        leaving.last_steps, written = iterations.repeat(self._recorder.storages, marks, times)
        leaving.last_whole = whole + times
        return None if known is None else max(0, times - written)

    def _end_alike(self) -> bool:
        leaving = self._leaving
        self.is_ending = True
        leaving.repeated[self.where] += 1
        has_batches = self._has_batches()
        self._repeat()
        if all(kept > 0 for kept in self._on_host):  # one alone may be its batch
            self._recorder.collect_from(self._first)
        return has_batches

    # --- what it reads ---

    def _rests(self) -> list[Rest]:
        """What is left of the batches that are read in this loop."""
        found = self._leaving.epochs.read_since(self._clock)
        return found if self.rest is None or self.is_fed else [*found, self.rest]

    def _has_batches(self) -> bool:
        return any(rest.has_more() for rest in self._rests())

    # --- a list of runs ---

    def _was_run(self) -> bool:
        """Whether the iteration that ends was a run of its own."""
        stepped = set(self._leaving.made.since(self._step))
        if self.runs is None or not stepped or self.is_fed:
            return False
        if self._made_its_optimizers():
            return True
        return self.runs.varies and (self.runs.are_settings or not self.steps_itself)

    def _made_its_optimizers(self) -> bool:
        return all(number >= self._optimizers for number in self._leaving.made.since(self._step))

    def _goes_to_next_run(self) -> bool:
        leaving, runs, (row, *_) = self._leaving, self.runs, self._top
        assert runs is not None
        self.is_list = True
        builder = self._recorder.builder
        leaving.runs.append(ItemRun(self.where, runs.label, row, len(builder.rows)))
        if self._is_of_short_program():
            return self._begin_run()
        goes_on = runs.go_on(iterations.peak(builder, row), self._made_its_optimizers())
        goes_on = self._goes_on_growing() or goes_on
        if runs.skipped and not goes_on:
            code = Code.RUNS_SKIPPED if runs.differ else Code.RUNS_ALIKE
            leaving.remarks[code.about(place=self.where, followed=runs.followed)] = 1
        leaving.note_end()
        return goes_on and self._begin_run()

    def _begin_run(self) -> bool:
        self._leaving.begin_run()
        self._since = len(self._leaving.made)
        return True

    # --- a search ---

    def _tries_another_size(self) -> bool:
        """Whether the last iteration's peak differs from the one before: a search tries another size."""
        if self._trials_left == 0 or self._peaks[-2:-1] == self._peaks[-1:]:
            return False
        self._trials_left -= 1
        return self._begin_run()

    def _note_end_of_step(self) -> None:
        """Note the end of an iteration with a step, or of any where there was none before."""
        self._iterations_since += 1
        if self._step < len(self._leaving.made) or self.began == len(self._leaving.made):
            self._marks.append(len(self._recorder.builder.rows))
            self._iterations, self._iterations_since = self._iterations_since, 0

    def _note_peak(self) -> None:
        if self._trials_left or (self._step < len(self._leaving.made) and not self.is_list):
            self._peaks.append(iterations.peak(self._recorder.builder, self._top[0]))

    # --- a loop that waits ---

    def _waits_in_vain(self) -> bool:
        """Whether the loop waits for elements to become fewer of which all are assumed to be selected; where it has
        done so before, that is known sooner."""
        values, waited = self._recorder.assumed_values, self._leaving.waited
        (times, before), self._selected = self._selected, (values.selections, values.last_selection)
        is_alike = values.selections > times and values.last_selection == before
        self._waited = self._waited + 1 if is_alike and self._left is None and not self.steps_itself else 0
        if self._waited < (ALIKE_ITERATIONS if self.where in waited else MOST_WAITING):
            return False
        waited.add(self.where)
        return True

    # --- iterations that are alike ---

    def _may_train(self) -> bool:
        """Whether the loop, or the one that asks this loader for its batches, comes to training by what it calls."""
        inside = self._leaving.fetching
        calls = self._calls if inside is None else (*self._calls, *inside._calls)
        return come_to_training(calls, self._leaving.calls)

    def _repeats(self) -> bool:
        """Note the last iteration; whether the last ones were alike: forward passes that kept nothing."""
        before, now = self._top, self._now()
        if self._recorder.attribution.module_depth:
            return False
        if now[1] != before[1] or now[2] == before[2] or len(self._leaving.made) != self._since:
            self._bodies.clear()
            return False
        builder = self._recorder.builder
        body, kept, on_host = iterations.body(builder, before[0])
        self._on_host.append(on_host)
        if kept or (self._bodies and self._bodies[-1] != body):
            self._bodies.clear()
        if not kept:
            self._bodies.append(body)
        return len(self._bodies) >= ALIKE_ITERATIONS
