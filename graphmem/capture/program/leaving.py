"""When a program's loops end: a program is analysed for some optimizer steps, and was written for thousands.

A loop ends at its top, so that what follows it (evaluation, generation, saving) still runs:

- a loop *has trained* when an optimizer stepped in it, and ends when every optimizer that stepped in it has made its
  steps (:data:`graphmem.training.program.OPTIMIZER_STEPS`);
- a loop of forward passes *without* a backward pass ends when three iterations in a row were alike: the same bytes
  taken and given back in the same order, and nothing kept on the device. One that keeps something there goes on to its
  end. What it collects on the host is remembered: were that put on the device, too little of it would be there. One
  that may yet train, by what it calls (:mod:`graphmem.capture.program.training_calls`), goes on until it does.
- a loop that *searches*, by handling errors of memory in its iterations, goes on after such steps with its optimizers'
  steps counted anew, until two iterations took as much memory: batch size finders train with every size they try.

Loops are the ``for`` and ``while`` loops of the program's own files (:mod:`graphmem.capture.program.loops`) and the
iterators of data loaders, whoever drives them; a loader that has trained has no batches left for the next epoch. A
loop that nobody can end, in a library, is left by an exception when an optimizer begins a step beyond the last.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import length_hint
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from graphmem.capture.patches import Patches
from graphmem.capture.program.decoding import FEWEST, Decoding
from graphmem.capture.program.loop_state import Lists
from graphmem.capture.program.training_calls import come_to_training
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.values import callers
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private
from graphmem.trace import EventKind, Place
from graphmem.units import format_bytes

#: Iterations in a row that have to be alike.
ALIKE_ITERATIONS = 3
#: Sizes that a search tries, as many as Lightning's tuner by default; more are batches of many lengths.
MOST_TRIALS = 25
#: Bytes that a step may keep and its loop still be called alike: a few numbers for a log.
_NUMBERS_BYTES = 1024
#: Epochs that a library may begin on a loader that has no batches left.
AGAIN = 3


class Left(BaseException):
    """Raised in the program to leave it; not an :class:`Exception`, which programs catch."""


class Leaving:
    """Counts optimizer steps and decides which loops are over. ``steps``: how many each optimizer makes.
    ``ends_alike_loops``: whether loops without a backward pass end when their iterations are alike. ``shortens``:
    whether of long loops whose iterations grow evenly only some are followed (:mod:`.decoding`)."""

    def __init__(self, steps: int, recorder: Recorder, ends_alike_loops: bool = True, shortens: bool = False) -> None:
        self.wanted = steps
        self.ends_alike_loops = ends_alike_loops
        self.shortens = shortens
        self.recorder = recorder
        self.log: list[int] = []  # numbers of the optimizers, step by step
        self.made: Counter[int] = Counter()
        self.is_ending = False  # whether a loop that trained was ended
        self.repeated: Counter[str] = Counter()  # where a loop without training was left early -> how often
        self.calls: dict[str, set[str]] = {}  # what functions of the program's files call, by their names
        self.fetching: Loop | None = None  # the loop of the program that asks for an item, of a data loader perhaps
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ends: dict[int, deque[tuple[int, int]]] = {}  # optimizer -> where its last steps ended: row, storages
        self._doubted: set[int] = set()  # optimizers whose steps are known to differ

    @property
    def steps(self) -> int:
        """The steps of the optimizer that made the most."""
        return max(self.made.values(), default=0)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises :class:`Left` at a step beyond the last. Where loops were ended there may be one more, of what is left
        over of micro-batches."""
        if self.made[self._number(optimizer)] >= self.wanted + self.is_ending:
            self.doubt_others(0, "a loop that was left")
            raise Left

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        number = self._number(optimizer)
        self.log.append(number)
        self.made[number] += 1
        builder = self.recorder.builder
        ends = self._ends.setdefault(number, deque(maxlen=ALIKE_ITERATIONS))
        ends.append((len(builder.rows), len(builder.storage_bytes)))

    def doubt_others(self, since: int, where: str) -> None:
        """Note that a loop was left whose steps from number ``since`` on do not show what later ones take."""
        for number in sorted({*self.log[since:]} - self._doubted):
            found = self._doubt(number, where)
            if found is not None:
                self._doubted.add(number)
                self.recorder.assumed[found] += 1

    def _doubt(self, number: int, where: str) -> Diagnostic | None:
        """Why later steps of an optimizer may take more than its last two with all that was done before each: they took
        and gave back other bytes, or kept some; None where nothing says so, or there were no two after the first."""
        builder, ends, steps = self.recorder.builder, self._ends[number], self.made[number]
        spans = [_body(builder, *begin, until=end[0]) for begin, end in pairwise(ends)]
        if any(before[0] != after[0] for before, after in pairwise(spans)):
            return Code.STEPS_DIFFER.about(place=where, steps=steps)
        kept = spans[-1][1] if len(spans) > 1 else 0
        if kept <= _NUMBERS_BYTES:
            return None
        return Code.STEPS_KEEP.about(place=where, steps=steps, kept=format_bytes(kept))

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        return self._numbers.setdefault(optimizer, len(self._numbers))

    def begin_anew(self) -> None:
        """Every optimizer makes its steps once more."""
        self.made.clear()

    def is_trained(self, since: int) -> bool:
        """Whether the steps from number ``since`` on are there, and were the last of all their optimizers."""
        stepped = set(self.log[since:])
        return bool(stepped) and all(self.made[number] >= self.wanted for number in stepped)


class Loop:
    """One run of one loop, from its beginning to its end. ``calls``: the names of what it calls."""

    def __init__(self, leaving: Leaving, where: str, searches: bool = False, calls: tuple[str, ...] = ()) -> None:
        self._leaving = leaving
        self._where = where
        self._calls = calls
        self._trials_left = MOST_TRIALS if searches else 0
        self._trial_peak, self._trial_row = -1, len(leaving.recorder.builder.rows)
        self._since = len(leaving.log)
        self._first = len(leaving.recorder.builder.storage_bytes)
        self._is_over = self.has_trained = False
        self._top = self._now()
        self._bodies: list[Any] = []  # what the last iterations did, as long as they were alike
        self._on_host: deque[int] = deque(maxlen=ALIKE_ITERATIONS)  # bytes that the last iterations left there
        self._always_goes_on = False

    def never_ends(self) -> None:
        """The loop is not one of repetitions: its items decide its length."""
        self._always_goes_on = True

    def _now(self) -> tuple[int, int, int, int]:
        recorder = self._leaving.recorder
        builder = recorder.builder
        return (
            len(builder.rows),
            len(builder.storage_bytes),
            recorder.phases.backward_passes,
            recorder.phases.forward_passes,
        )

    def fetch(self, items: Iterator[Any]) -> object:
        """The next of the loop's items; data loaders that are asked for it know this loop."""
        leaving = self._leaving
        outer, leaving.fetching = leaving.fetching, self
        try:
            return next(items)
        finally:
            leaving.fetching = outer

    def goes_on(self, left: int = 1) -> bool:
        """Asked at the top, before every iteration: whether there is one more; ``left``: how many there would be, 0 if
        it ends by itself."""
        if self._is_over or self._always_goes_on:
            return not self._is_over
        leaving = self._leaving
        takes_other = self._trials_left > 0 and self._takes_other_memory()
        if leaving.is_trained(self._since):
            if takes_other:
                self._trials_left -= 1
                self._since = len(leaving.log)
                leaving.begin_anew()
                return True
            leaving.is_ending = self._is_over = self.has_trained = True
            if left:
                leaving.doubt_others(self._since, self._where)
            return False
        if leaving.ends_alike_loops and self._repeats() and not self._may_train():
            leaving.repeated[self._where] += 1
            if self._collects():
                leaving.recorder.collected.begin(self._first)
            self._is_over = True
            return False
        return True

    def _may_train(self) -> bool:
        """Whether the loop, or the one that asks this loader for its batches, comes to training by what it calls."""
        inside = self._leaving.fetching
        calls = self._calls if inside is None else (*self._calls, *inside._calls)
        return come_to_training(calls, self._leaving.calls)

    def _takes_other_memory(self) -> bool:
        """Note the last iteration's peak; whether it differs from the one before: a search tries another size."""
        builder, before = self._leaving.recorder.builder, self._trial_peak
        self._trial_peak, self._trial_row = _peak(builder, self._trial_row), len(builder.rows)
        return self._trial_peak != before

    def _collects(self) -> bool:
        """Whether every one of the last iterations left something on the host. One alone may be its batch."""
        return all(kept > 0 for kept in self._on_host)

    def _repeats(self) -> bool:
        """Note the last iteration; whether the last ones were alike: forward passes that kept nothing."""
        before, self._top = self._top, self._now()
        if self._leaving.recorder.attribution.module_depth:
            return False
        if self._top[2] != before[2] or self._top[3] == before[3] or len(self._leaving.log) != self._since:
            self._bodies.clear()
            return False
        builder = self._leaving.recorder.builder
        body, kept, on_host = _body(builder, before[0], before[1])
        self._on_host.append(on_host)
        if kept or (self._bodies and self._bodies[-1] != body):
            self._bodies.clear()
        if not kept:
            self._bodies.append(body)
        return len(self._bodies) >= ALIKE_ITERATIONS


_SIGNS = {int(EventKind.ALLOC): 1, int(EventKind.FREE): -1}


def _peak(builder: Any, row: int) -> int:
    """The most bytes on the device since a row of the trace, over those that were there."""
    held = most = 0
    for kind, subject, _, _ in builder.rows[row:]:
        if kind in _SIGNS and builder.places[subject] is Place.DEVICE:
            held += _SIGNS[kind] * builder.storage_bytes[subject]
            most = max(most, held)
    return most


def _body(builder: Any, row: int, first: int, until: int | None = None) -> tuple[list[Any], int, int]:
    """One iteration of a loop, to be compared with the next one: a loop whose iterations are equal is left.

    The events on the device from a row of the trace on, storages counted from ``first``, the first that the iteration
    made, and older ones given by their bytes; the bytes that were kept there, and those kept on the host.
    """
    body: list[Any] = []
    kept = on_host = 0
    sizes, places, streams = builder.storage_bytes, builder.places, builder.streams
    for kind, subject, _, stream in builder.rows[row:until]:
        if kind > EventKind.RECORD_STREAM:
            body.append((kind, stream))
            continue
        if places[subject] is not Place.DEVICE:
            on_host += _SIGNS.get(kind, 0) * sizes[subject] if places[subject] is Place.HOST else 0
            continue
        name = subject - first if subject >= first else -sizes[subject] - 1
        if kind == EventKind.ALLOC:
            kept += sizes[subject]
            body.append((kind, sizes[subject], streams[subject]))
        elif kind == EventKind.FREE:
            kept -= sizes[subject]
            body.append((kind, name))
        else:
            body.append((kind, name, stream))
    return body, kept, on_host


# --- where it is asked ------------------------------------------------------------------------------------------------


def patch_leaving(patches: Patches, leaving: Leaving) -> list[Any]:
    """Let data loaders and optimizers report to ``leaving``; returns the handles of hooks."""
    loops: weakref.WeakKeyDictionary[Any, tuple[Any, Loop]] = weakref.WeakKeyDictionary()
    finished: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # loaders -> how often since
    iterator = private("torch.utils.data.dataloader._BaseDataLoaderIter", "loops over data loaders are not left early")
    begin, following = dataloader.DataLoader.__iter__, iterator.__next__
    only = patches.threads.only

    def iterate(self: Any) -> object:
        iterator = begin(self)
        loops[iterator] = weakref.ref(self), Loop(leaving, "a data loader")
        return iterator

    def next_batch(self: Any) -> object:
        loader, loop = loops.get(self, (None, None))
        whole = loader() if loader is not None else None
        if loop is None:
            return following(self)
        if whole in finished:
            finished[whole] += 1
            if finished[whole] > AGAIN:
                raise Left
            raise StopIteration
        if not loop.goes_on():
            if loop.has_trained and whole is not None:
                finished[whole] = 0
            raise StopIteration
        return following(self)

    patches.set(dataloader.DataLoader, "__iter__", iterate)
    patches.set(iterator, "__next__", next_batch)
    return [
        torch_optimizer.register_optimizer_step_pre_hook(only(lambda optimizer, *_: leaving.before_step(optimizer))),
        torch_optimizer.register_optimizer_step_post_hook(only(lambda optimizer, *_: leaving.after_step(optimizer))),
    ]


class Loops:
    """The functions that the rewritten loops of a program call (:mod:`graphmem.capture.program.loops`)."""

    def __init__(self, leaving: Leaving) -> None:
        self._leaving = leaving

    def over(
        self,
        items: Iterable[Any],
        where: str,
        searches: bool = False,
        is_even: bool = False,
        is_numbered: bool = False,
        calls: tuple[str, ...] = (),
    ) -> Iterator[Any]:
        """The items of a ``for`` loop, until it is over. ``is_even``: nothing in it is done every so often;
        ``is_numbered``: the same, and it reads its items; ``calls``: the names of what it calls."""
        loop = Loop(self._leaving, where, searches, calls)
        numbers = _range(items) if is_even or is_numbered else range(0)
        recorder = self._leaving.recorder
        can_probe = self._leaving.shortens and not recorder.is_probing and not recorder.attribution.module_depth
        if can_probe and len(numbers) >= FEWEST:
            return _Numbers(
                iter(items), loop, numbers, Decoding(recorder, len(numbers), Lists(), is_numbered=is_numbered)
            )
        return _Items(iter(items), loop)

    def begin(self, where: str, searches: bool = False, calls: tuple[str, ...] = ()) -> Loop:
        """A ``while`` loop begins."""
        return Loop(self._leaving, where, searches, calls)

    def know(self, /, **calls: tuple[str, ...]) -> None:
        """Note what the functions of a file call."""
        for name, called in calls.items():
            self._leaving.calls.setdefault(name, set()).update(called)


class _Items:
    """An iterator that ends with its loop."""

    def __init__(self, items: Iterator[Any], loop: Loop) -> None:
        self._items, self._loop = items, loop
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> object:
        if not self._loop.goes_on(length_hint(self._items, 1)):
            raise StopIteration
        item = self._loop.fetch(self._items)
        if self._is_first:
            self._is_first = False
            if _holds_parts(item):
                self._loop.never_ends()
        return item


class _Numbers(_Items):
    """An iterator over numbers, which can go on at any of them."""

    def __init__(self, items: Iterator[Any], loop: Loop, numbers: range, decoding: Decoding) -> None:
        super().__init__(items, loop)
        self._numbers, self._decoding = numbers, decoding
        self._done = 0
        self._is_put_forward = False

    def __next__(self) -> object:
        decoding = self._decoding
        if self._done and not decoding.is_followed:
            decoding.note(self._done, callers.lists_by_name())
            self._is_put_forward |= decoding.is_probing
        if not self._is_put_forward:
            self._done += 1
            return super().__next__()
        self._done = decoding.length + 1
        if self._done > len(self._numbers):
            raise StopIteration
        return self._numbers[self._done - 1]


def _range(items: object) -> range:
    """The numbers that a loop goes over, a progress bar around them or not; none if it is over something else."""
    if type(items).__module__.partition(".")[0] == "tqdm":
        items = getattr(items, "iterable", None)
    return items if isinstance(items, range) else range(0)


def _holds_parts(item: object) -> bool:
    """Whether a loop goes over the parts of a model, or over optimizers: its length is no number of repetitions."""
    parts = (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    if isinstance(item, (tuple, list)):
        return any(_holds_parts(part) for part in item)
    return isinstance(item, parts)
