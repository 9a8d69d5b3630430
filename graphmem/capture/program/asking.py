"""Where :class:`graphmem.capture.program.leaving.Leaving` is asked: data loaders, optimizers, and the functions that
the rewritten loops of a program call."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import length_hint
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from graphmem.capture.patches import Patches
from graphmem.capture.program.ahead import MOST_TESTED, Key, value_of
from graphmem.capture.program.counters import Counter
from graphmem.capture.program.decoding import FEWEST, Decoding
from graphmem.capture.program.epochs import MOST_HELD, Rest
from graphmem.capture.program.leaving import Leaving, Left
from graphmem.capture.program.loop import Loop
from graphmem.capture.program.loop_state import Lists
from graphmem.capture.program.places import calls_a_library, handles_the_end
from graphmem.capture.program.runs import Runs
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.values import callers
from graphmem.capture.values.tensors import parts_of
from graphmem.torch_names import private
from graphmem.training.program import LibraryFunction, Steps

# --- data loaders and optimizers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def loops_left(
    steps: Steps, recorder: Recorder, ends_alike: bool, shortens: bool, opens: Sequence[LibraryFunction] = ()
) -> Iterator[Leaving]:
    """End the loops of a whole program after so many optimizer steps; options as of :class:`Leaving`."""
    leaving = Leaving(steps, recorder, ends_alike, shortens, opens)
    recorder.phases.names_stages = True
    handles = []
    with Patches() as patches:
        try:
            handles = _patch(patches, leaving)
            yield leaving
        finally:
            for handle in handles:
                handle.remove()


def _patch(patches: Patches, leaving: Leaving) -> list[Any]:
    """Let data loaders and optimizers report to ``leaving``; returns the handles of hooks."""
    loops: weakref.WeakKeyDictionary[Any, _LoaderLoop] = weakref.WeakKeyDictionary()
    iterator = private("torch.utils.data.dataloader._BaseDataLoaderIter", "loops over data loaders are not left early")
    begin, following = dataloader.DataLoader.__iter__, iterator.__next__
    make = torch_optimizer.Optimizer.__init__
    only = patches.threads.only

    def iterate(self: Any) -> object:
        iterator = begin(self)
        loops[iterator] = _LoaderLoop(leaving, self, iterator, following)
        return iterator

    def next_batch(self: Any) -> object:
        loop = loops.get(self)
        return following(self) if loop is None else loop.next_batch(self)

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        leaving.note_optimizer(self)

    patches.set(dataloader.DataLoader, "__iter__", iterate)
    patches.set(iterator, "__next__", next_batch)
    patches.set(torch_optimizer.Optimizer, "__init__", made)
    return [
        torch_optimizer.register_optimizer_step_pre_hook(only(lambda optimizer, *_: leaving.before_step(optimizer))),
        torch_optimizer.register_optimizer_step_post_hook(only(lambda optimizer, *_: leaving.after_step(optimizer))),
    ]


class _LoaderLoop:
    """One pass over a data loader."""

    def __init__(self, leaving: Leaving, loader: Any, iterator: Any, following: Any) -> None:
        leaving.open(loader)
        passing = weakref.ref(iterator)
        self._leaving, self._loader, self._following = leaving, weakref.ref(loader), following
        self._rest = Rest(leaving.epochs, "a data loader", lambda: following(passing()))
        leaving.epochs.begin(self._rest)
        self._loop = Loop(leaving, "a data loader", rest=self._rest)

    def next_batch(self, iterator: Any) -> object:
        leaving, loop, inside = self._leaving, self._loop, self._leaving.fetching
        if inside is not None:
            inside.is_fed = True
            loop.end_with(inside)
        elif loops := leaving.asking():
            return self._give(iterator, loops)
        if leaving.is_finished(self._loader()):
            if isinstance(sys.exc_info()[1], StopIteration):  # it was opened anew to go round: no batch is none at all
                raise leaving.left()
            raise StopIteration
        was_over = loop.is_over
        if not loop.goes_on():
            if loop.has_trained and self._loader() is not None and not was_over:
                leaving.finish(self._loader(), self._rest.varies)
            return self._rest.final_batch() if loop.has_trained and callers.ends_lightnings_epoch() else self._stop()
        try:
            if loop.is_ending:
                batch = self._rest.next_batch()
            elif self._rest.spares:
                return self._rest.spares.popleft()
            else:
                batch = self._following(iterator)
        except StopIteration:
            loop.end()
            raise
        self._rest.note(batch)
        return batch

    def _give(self, iterator: Any, loops: Sequence[Loop]) -> object:
        """The next batch for loops of the program that ask for it by hand: they end at their own tops, and this is no
        loop beside them."""
        self._loop.is_over = True
        self._rest.is_guarded = self._rest.is_guarded or handles_the_end({loop.frame for loop in loops})
        batch = None
        if not any(loop.is_ending for loop in loops):
            batch = self._rest.again()
        elif self._rest.holds:
            batch = self._rest.next_batch()
        if batch is None:
            batch = self._following(iterator)
        self._rest.note(batch)
        return batch

    def _stop(self) -> object:
        raise StopIteration


# --- loops ------------------------------------------------------------------------------------------------------------


_Compute = Callable[[Any], object]
#: Functions of a number, how many of them are early, the tests at which its loop ends, and loops around that.
_Counts = tuple[Sequence[_Compute], int, Sequence[_Compute], int]


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
        name: str = "",
        keys: Sequence[_Compute] = (),
        is_handed_on: bool = False,
        counters: Sequence[_Counts] = (),
    ) -> Iterator[Any]:
        """The items of a ``for`` loop, until it is over. ``is_even``: nothing in it is done every so often;
        ``is_numbered``: the same, and it reads its items; ``calls``: the names of what it calls; ``name`` of its items,
        and the ``keys`` that it computes from them, which ``is_handed_on`` to functions of others; ``counters``: the
        numbers that it counts on itself."""
        numbers = _range(items)
        own = self._counters(counters)
        runs = Runs(items, name, numbers, [*map(self._aside, keys)], is_handed_on, _enumerated(items), own)
        recorder = self._leaving.recorder
        can_probe = self._leaving.shortens and not recorder.is_probing and not recorder.attribution.module_depth
        if (is_even or is_numbered) and can_probe and numbers is not None and len(numbers) >= FEWEST:
            decoding = Decoding(recorder, len(numbers), Lists(), is_numbered=is_numbered)
            return _Numbers(self._leaving, items, where, searches, calls, runs, numbers, decoding)
        return _Items(self._leaving, items, where, searches, calls, runs)

    def begin(
        self, where: str, searches: bool = False, calls: tuple[str, ...] = (),
        counters: Sequence[_Counts] = (),
    ) -> Loop:  # fmt: skip
        """A ``while`` loop begins."""
        return Loop(self._leaving, where, searches, calls, Runs(counters=self._counters(counters)))

    def _counters(self, counters: Sequence[_Counts]) -> list[Counter]:
        return [
            Counter([*map(self._aside, keys)], early, [*map(self._aside, ends)], around)
            for keys, early, ends, around in counters
        ]

    def _aside(self, compute: _Compute) -> Key:
        """What a function of the program's text computes. Its operators are no part of the program: it may take tensors
        on the card (``data[order[i : i + 64]]``), which are gone where it ends."""

        def key(item: Any) -> object:
            with self._leaving.recorder.paused():
                return value_of(compute, item)

        return key

    def go_on(self) -> None:
        """Called where a statement was left: goes on behind it, if the program itself called a library there. Else
        raises the error anew: what the program's own function, or the library's, would do yet is not seen."""
        error = sys.exc_info()[1]
        assert error is not None
        if not calls_a_library(error.__traceback__, self._leaving.files):
            raise error
        self._leaving.go_on(error)

    def know(self, file: str, /, **calls: tuple[str, ...]) -> None:
        """Note a file of the program, and what its functions call."""
        self._leaving.files.add(file)
        for name, called in calls.items():
            self._leaving.calls.setdefault(name, set()).update(called)


class _Items:
    """An iterator that ends with its loop."""

    def __init__(
        self, leaving: Leaving, items: Iterable[Any], where: str, searches: bool, calls: tuple[str, ...], runs: Runs
    ) -> None:
        iterator = iter(items)
        self._rest = Rest(leaving.epochs, where, lambda: next(iterator))
        self.runs = runs
        self._loop = Loop(leaving, where, searches, calls, runs, self._rest)
        runs.over(iterator)
        self._iterator = iterator
        self._is_first = True
        self._after = 0  # items that a loader gave after the loop was over

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> object:
        loop = self._loop
        try:
            return self._next()
        except StopIteration:
            loop.end()
            raise

    def _next(self) -> object:
        loop = self._loop
        if not loop.goes_on(_left(self._iterator)):  # loaders end by themselves, behind those who read ahead
            self._after += 1
            if not loop.is_fed or self._after > MOST_HELD:
                raise StopIteration
            loop.is_over = False
        if loop.is_ending and self._rest.holds:
            return self._rest.next_batch()
        try:
            item = self.runs.take(loop.fetch)
        except Left:
            if loop.is_ending:
                raise StopIteration from None
            raise
        if self._is_first:
            self._is_first = False
            if _holds_parts(item):
                loop.never_ends()
        self._rest.note(item)
        loop.begin_body()
        return item


class _Numbers(_Items):
    """An iterator over numbers, which can go on at any of them."""

    def __init__(
        self, leaving: Leaving, items: Iterable[Any], where: str, searches: bool, calls: tuple[str, ...], runs: Runs,
        numbers: range, decoding: Decoding,
    ) -> None:  # fmt: skip
        super().__init__(leaving, items, where, searches, calls, runs)
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


def _left(iterator: Iterator[Any]) -> int | None:
    """How many items there will be; None where the iterator does not say."""
    return _count(_counted(iterator)[0])


def _count(items: object) -> int | None:
    """How many items there are, as far as those who give them say so."""
    try:
        count = length_hint(items, -1)
    except Exception:  # a sampler's own
        return None
    return None if count < 0 else count


def _counted(items: Any) -> tuple[Any, int]:
    """The iterator that ``enumerate`` goes over, and the number of its next item; else the items themselves."""
    if not isinstance(items, enumerate):
        return items, 0
    reduced: Any = items.__reduce__()
    iterator, number = reduced[1]
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None and _is_of_bars(frame.f_globals.get("__name__", "")):
        iterator = callers.variables(frame).get("self", iterator)
    return iterator, number


def _enumerated(items: Any) -> range | None:
    """The numbers of ``enumerate(...)``, a progress bar within it, around it, or none; None if it is something else."""
    within = getattr(items, "iterable", None) if _is_bar(items) else items
    if not isinstance(within, enumerate):
        return None
    iterator, first = _counted(within)
    count = _count(items if _is_bar(items) else iterator)
    return range(first, first + (MOST_TESTED if count is None else count))


def _is_bar(items: object) -> bool:
    """Whether something shows the progress over others."""
    return _is_of_bars(type(items).__module__)


def _is_of_bars(module: str) -> bool:
    return module.partition(".")[0] == "tqdm"


def _range(items: object) -> range | None:
    """The numbers that a loop goes over, a progress bar around them or not; None if it is over something else."""
    if _is_bar(items):
        items = getattr(items, "iterable", None)
    return items if isinstance(items, range) else None


def _holds_parts(item: object) -> bool:
    """Whether a loop goes over the parts of a model, or over optimizers: its length is no number of repetitions."""
    parts = (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    if isinstance(item, (tuple, list)):
        return any(map(_holds_parts, parts_of(item)))
    return isinstance(item, parts)
