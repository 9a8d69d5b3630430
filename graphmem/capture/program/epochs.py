"""The rest of an epoch: the batches that a loop does not come to, as it is over after some steps.

Host data is real. When a loop that reads batches is over, the rest of them is read without the program's step, as many
as :class:`Epochs` allows; only the shapes are kept. A batch that is larger than all before it, in all or in one of
its dimensions, is held, and some of those whose shapes are new. The loop then goes on with these: its largest steps are
captured as they are, in their order, and the allocator meets the sizes that it would.

Where a step takes several batches, those of one step are held together: a batch that comes first in its step meets no
gradients, and one that comes later does.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphmem.capture.values.tensors import on_device, parts_of
from graphmem.diagnostics import Code, Diagnostic
from graphmem.training.program import EPOCH_BATCHES, EPOCH_NUMBERS, EpochRead

#: Batches of one epoch that are given to the program after its steps.
MOST_HELD = 12
#: Of steps of several batches, so many are held however many batches those are; with more batches each, single ones.
_FEWEST_STEPS, _MOST_IN_STEP = 4, 8
#: As many tensors of a batch are compared one by one.
_FEW_TENSORS = 8
#: How deep and how far containers are looked into for tensors.
_DEEPEST, _MOST_ITEMS = 4, 4096

#: The shapes of the tensors and arrays in a batch.
Shapes = tuple[tuple[int, ...], ...]


class Epochs:
    """All epochs of a program, and how much of them may still be read."""

    def __init__(self) -> None:
        self.batches: float = EPOCH_BATCHES
        self.numbers: float = EPOCH_NUMBERS
        self.clock = 0  # goes on with every batch that a loader is asked for
        self.steps = 0  # of all optimizers
        self.read: list[EpochRead] = []
        self.varied = 0  # of them, with batches of several shapes
        self.smaller = 0  # those of which the last batch alone has another shape
        self.remarks: dict[Diagnostic, int] = {}
        self._rests: list[weakref.ref[Rest]] = []

    def limit(self, epoch: str) -> None:
        """Read as :attr:`graphmem.training.program.Program.epoch` asks."""
        if epoch == "first":
            self.batches = 0
        elif epoch != "auto":
            self.batches = int(epoch.split()[1]) if epoch.startswith("sample") else math.inf
            self.numbers = math.inf

    def may_read(self) -> bool:
        """Asked before every batch: whether there may be another one."""
        self.batches -= 1
        return self.batches >= 0 and self.numbers > 0

    def begin(self, rest: Rest) -> None:
        self._rests.append(weakref.ref(rest))

    def read_since(self, clock: int) -> list[Rest]:
        """Of the loaders that were asked for a batch since then."""
        rests = [rest for ref in self._rests if (rest := ref()) is not None]
        self._rests = [weakref.ref(rest) for rest in rests]
        return [rest for rest in rests if rest.asked > clock]


class Rest:
    """The batches of one iterator: ``note`` those that the program takes; then ``next_batch`` of those that remain.
    ``fetch`` gives the iterator's next batch."""

    def __init__(self, epochs: Epochs, where: str, fetch: Callable[[], Any]) -> None:
        self.where = where
        self.asked = 0  # at which time of the epochs' clock
        self._epochs, self._fetch = epochs, fetch
        self._taken_at: list[int] = []  # times of the clock
        self.is_guarded = False  # whether the program handles that it is out
        self._seen: list[Shapes] = []
        self._most: dict[object, int] = {}
        self._held: deque[Any] = deque()
        self.spares: deque[Any] = deque()  # read batches that are kept for steps that differ by their number
        self._first: Any = None  # the first and the last that were read
        self._final: Any = None
        self._is_read = False
        self._spared = 0
        self.is_on_device = False  # whether the last batch was: who reads the next ones makes them there
        self._patience = MOST_HELD
        self._step, self._in_step, self._per_step = epochs.steps, 0, 1  # batches since the last step, and before it

    def note(self, batch: object) -> None:
        """The program takes a batch."""
        self._note_steps()
        self._in_step += 1
        self._epochs.clock += 1
        self.asked = self._epochs.clock
        self._taken_at.append(self.asked)
        if not self._is_read:
            self._measure(batch)

    @property
    def is_known(self) -> bool:
        """Whether the batches that remain were read."""
        return self._is_read and bool(self._seen and self._seen[-1]) and self._epochs.batches > 0

    @property
    def _taken(self) -> int:
        return len(self._taken_at)

    def ahead_of(self, clock: int) -> int:
        """How many batches the program had taken at that time; 0 where it does not handle that there are no more."""
        return bisect_right(self._taken_at, clock) if self.is_guarded else 0

    @property
    def left(self) -> int:
        """How many batches were read that the program does not take."""
        return len(self._seen) - self._taken - len(self._held)

    @property
    def varies(self) -> bool:
        """Whether batches of several shapes were read, beside a last one that is smaller."""
        return self._is_read and len(set(self._seen)) > 2

    @property
    def differs(self) -> bool:
        """Whether batches of several shapes were seen."""
        return len(set(self._seen)) > 1

    @property
    def holds(self) -> bool:
        """Whether a larger batch is held."""
        return bool(self._held)

    def has_more(self) -> bool:
        """Whether there are larger batches; those that nobody asks for are given up."""
        if not self._is_read:
            self._is_read = True
            if self._seen and self._seen[-1] and self._epochs.batches:
                self._read()
        self._patience -= 1
        return bool(self._held) and self._patience > 0

    def spare(self, count: int) -> None:
        """Read the rest, and keep so many batches as they come."""
        if not self._is_read:
            self._spared = count
            self.has_more()

    def next_batch(self) -> Any:
        """Raises :class:`StopIteration` after the last one."""
        self._patience = MOST_HELD
        if not self._held:
            raise StopIteration
        return self._held.popleft()

    def final_batch(self) -> Any:
        """The last batch of the epoch, once. Raises :class:`StopIteration` where it was not read."""
        if self._final is None:
            raise StopIteration
        final, self._final = self._final, None
        return final

    def again(self) -> Any:
        """A batch in the place of one that was read and left out, where a program goes on to ask for those; None where
        there is none."""
        return self._first if self.left > 0 else None

    def _note_steps(self) -> None:
        """Whether optimizers have stepped since the last batch: those before it are of one step."""
        if self._step != self._epochs.steps and self._in_step:
            self._step, self._in_step, self._per_step = self._epochs.steps, 0, self._in_step

    # --- reading ---

    def _measure(self, batch: object) -> bool:
        """Note the shapes of a batch; whether it is larger than all before it in something."""
        self.is_on_device = on_device(batch)
        shapes = () if self.is_on_device else tuple(_shapes_in(batch))
        self._seen.append(shapes)
        sizes = _sizes(shapes)
        is_larger = any(size > self._most.get(name, 0) for name, size in sizes.items())
        self._most |= {name: max(size, self._most.get(name, 0)) for name, size in sizes.items()}
        return is_larger

    def _read(self) -> None:
        self._note_steps()
        held = _Held(self._per_step, self._taken)
        whole = False
        while self._epochs.may_read():
            known = set(self._seen)
            try:
                batch = self._fetch()
            except StopIteration:
                whole = True
                break
            is_larger = self._measure(batch)
            if not self._seen[-1]:
                break
            self._first, self._final = batch if self._first is None else self._first, batch
            is_spare = len(self.spares) < self._spared
            if is_spare:
                self.spares.append(batch)
            self._epochs.numbers -= _sizes(self._seen[-1])["numbers"]
            held.add(batch, is_larger, self._seen[-1] not in known, is_spare)
        self._held.extend(held.batches(whole))
        self._report(whole)

    def _report(self, whole: bool) -> None:
        numbers = sorted(_sizes(shapes)["numbers"] for shapes in self._seen if shapes)
        epoch = EpochRead(
            self.where, len(self._seen), whole, len(set(self._seen)),
            numbers[0], numbers[len(numbers) // 2], numbers[-1], len(self._held),
        )  # fmt: skip
        self._epochs.read.append(epoch)
        self._epochs.varied += self.varies
        self._epochs.smaller += epoch.shapes == 2 and self._seen[-1] not in self._seen[:-1]
        if not whole:
            code = Code.EPOCH_VARIES if epoch.shapes > 1 else Code.EPOCH_ALIKE
            self._epochs.remarks[code.about(place=self.where, read=epoch.read)] = 1
        elif epoch.shapes > 1:
            remark = Code.EPOCH_READ.about(
                place=self.where, read=epoch.read, shapes=epoch.shapes, analysed=epoch.analysed
            )
            self._epochs.remarks[remark] = 1


class _Held:
    """Some batches in their order, behind ``taken`` ones: those that the step lacks which was begun (a loader may be
    read ahead); then of the steps of ``per_step`` batches the last with one that was larger than all before it, and the
    last ones with other shapes; about :data:`MOST_HELD` batches. Of a short epoch that ends within a step, all."""

    def __init__(self, per_step: int, taken: int) -> None:
        self._left_over = taken % per_step  # batches behind the last whole step
        self._all, self._in_step = list[Any](), per_step
        self._per_step = per_step if per_step <= _MOST_IN_STEP else 1
        self._most = max(MOST_HELD // self._per_step, _FEWEST_STEPS)
        self._lacking = -taken % self._per_step
        self._begun: list[Any] = []
        self._steps: list[tuple[list[Any], bool]] = []
        self._coming: list[Any] = []  # the batches of a step that is not whole
        self._is_larger = self._is_new = self._differs = False

    def add(self, batch: object, is_larger: bool, is_new: bool, is_spare: bool) -> None:
        self._left_over = (self._left_over + 1) % self._in_step
        if len(self._all) <= MOST_HELD and not is_spare:
            self._all.append(batch)
        if len(self._begun) < self._lacking:
            self._begun.append(batch)
            self._differs |= is_larger or is_new
            return
        self._coming.append(batch)
        self._is_larger |= is_larger
        self._is_new |= is_new
        if len(self._coming) == self._per_step:
            self._end_step()

    def batches(self, are_all: bool) -> list[Any]:
        """What the epoch leaves of a step is given only where it is larger, or where no batch before it is skipped:
        programs make that step by the number of the batch, and the gradients of one that is not made would stay.
        Without other batches nothing follows. ``are_all``: whether the epoch was read to its end."""
        if are_all and self._left_over and len(self._all) <= MOST_HELD:
            return self._all
        if self._is_larger:
            self._end_step()
        following = [batch for batches, _ in self._steps for batch in batches]
        return self._begun + following if following or self._differs else []

    def _end_step(self) -> None:
        if self._is_larger or self._is_new:
            self._steps.append((self._coming, self._is_larger))
        self._coming, self._is_larger, self._is_new = [], False, False
        if len(self._steps) > self._most:
            smaller = (place for place, (_, is_larger) in enumerate(self._steps) if not is_larger)
            del self._steps[next(smaller, 0)]


def _sizes(shapes: Shapes) -> dict[object, int]:
    """By name: the numbers in a batch, in each of its tensors where they are few, and the most in each dimension of
    tensors of as many dimensions."""
    numbers = [math.prod(shape) for shape in shapes]
    sizes: dict[object, int] = {"numbers": sum(numbers), **dict(enumerate(numbers[:_FEW_TENSORS]))}
    for shape in shapes:
        for axis, size in enumerate(shape):
            name = len(shape), axis
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def _shapes_in(value: Any, depth: int = 0) -> Iterator[tuple[int, ...]]:
    """The shapes of tensors, arrays and lists of numbers in nested containers and objects."""
    if depth > _DEEPEST or isinstance(value, (str, bytes)):
        return
    shape = None if isinstance(value, Mapping) else _said_shape(value)
    if isinstance(value, torch.Tensor) or isinstance(shape, tuple):
        yield tuple(shape or ())
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, (list, tuple)):
        value = parts_of(value)
        if len(value) > 1 and all(isinstance(one, (int, float)) for one in value[:2]):
            yield (len(value),)
            return
    else:
        is_batch = hasattr(value, "__dict__") and hasattr(type(value), "to") and not isinstance(value, torch.nn.Module)
        value = list(vars(value).values()) if is_batch else ()
    for item in value[:_MOST_ITEMS]:
        yield from _shapes_in(item, depth + 1)


def _said_shape(value: Any) -> Any:
    """The shape that an object says it has. Properties may raise what they like (a subject of TorchIO, whose images a
    loader has stacked)."""
    try:
        return getattr(value, "shape", None)
    except Exception:
        return None
