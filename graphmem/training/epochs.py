"""The batches that a training loop sees: their sizes in the order in which a data loader gives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from graphmem.base.options import Whole, check_values, option
from graphmem.base.records import public_value
from graphmem.errors import UsageError

#: Epochs when no number of iterations is given: the second begins with what the first one left.
EPOCHS = 2
#: Optimizer steps of an epoch when no number is given: one that comes first, and one that follows another.
LEAST_STEPS = 2
#: Lengths that a loop may go through; every one is built and run.
_MOST_LENGTHS = 100


@public_value(frozen=True, slots=True)
class BatchSize:
    """Rows and sequence length of one batch; None where the model's own default applies."""

    batch: int | None = None
    seq_len: int | None = None


@public_value(frozen=True, slots=True)
class Iteration:
    """The micro-batches of one optimizer step, and the batches that are evaluated after it."""

    micro_batches: tuple[BatchSize, ...]
    evaluated: tuple[BatchSize, ...] = ()


def checked_lengths(name: str, given: object) -> tuple[int, ...]:
    """Lengths of sequences. Raises :class:`UsageError`."""
    lengths = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if any(type(length) is not int or not 0 < length < 1 << 31 for length in lengths) or len(lengths) > _MOST_LENGTHS:
        raise UsageError(f"{name} is a list of 1 to {_MOST_LENGTHS} lengths, as (100, 128, 115), not {given!r}")
    return lengths


def parse_lengths(text: str) -> tuple[int, ...]:
    """``100,128,115`` as lengths. Raises :class:`UsageError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 11 for part in parts):
        raise UsageError(f"cannot read the lengths {text!r}; write them as 100,128,115")
    return checked_lengths("seq_lens", [int(part) for part in parts])


@public_value(frozen=True, slots=True)
class Epoch:
    """The differences between the batches of an epoch. Without any the same batch comes again and again. Raises
    :class:`UsageError`. ``micro_batches``: batches of one optimizer step."""

    seq_lens: tuple[int, ...] = option(
        (),
        "Sequence lengths of one batch after the other, e.g. 100,128,115.",
        checked_lengths,
        metavar="N,N,...",
        read=parse_lengths,
    )
    last_batch: int | None = option(None, "Rows of the last, smaller batch of an epoch.", Whole())
    eval_batches: int = option(0, "Batches that are evaluated without gradients after each epoch.", Whole(0))
    eval_batch_size: int | None = option(None, "Rows of those. Default: as in training.", Whole())
    steps_per_epoch: int | None = option(
        None, "Optimizer steps of an epoch. Default: those that go through every length, at least 2.", Whole()
    )
    micro_batches: int = 1

    def __post_init__(self) -> None:
        check_values(self)
        if self.eval_batch_size is not None and not self.eval_batches:
            raise UsageError("eval_batch_size is the size of the batches that eval_batches counts; give both")
        if self.steps_per_epoch is not None and not (self.last_batch or self.eval_batches or self.seq_lens):
            raise UsageError("steps_per_epoch says when an epoch ends: with seq_lens, last_batch or eval_batches")

    @property
    def varies(self) -> bool:
        """True if a loop that follows it does not train on one batch alone."""
        return bool(self.seq_lens or self.last_batch or self.eval_batches)

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch: as many as were asked for, else those that go through every length."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        return max(LEAST_STEPS, -(-len(self.seq_lens) // self.micro_batches))

    def iterations(self, batch: int | None, seq_len: int | None, count: int | None) -> tuple[Iteration, ...]:
        """``count`` optimizer steps (None: :data:`EPOCHS` epochs) with batches of ``batch`` rows.

        Raises :class:`UsageError` where the last batch would not be the smallest.
        """
        if self.last_batch is not None and batch is not None and self.last_batch > batch:
            raise UsageError(f"the last batch has at most as many rows as the others, {batch}, not {self.last_batch}")
        total = EPOCHS * self.steps if count is None else count
        lengths = self.seq_lens or (seq_len,)
        steps: list[Iteration] = []
        while len(steps) < total:
            steps += self._epoch(batch, lengths)
        return tuple(steps[:total])

    def sizes(self, batch: int | None, seq_len: int | None) -> tuple[BatchSize, ...]:
        """The batches that are trained on in one epoch."""
        return tuple(size for step in self.iterations(batch, seq_len, self.steps) for size in step.micro_batches)

    def _epoch(self, batch: int | None, lengths: Sequence[int | None]) -> Iterator[Iteration]:
        """The iterations of one epoch: the lengths in turn, the last batch smaller where asked, and the evaluation
        after the last step."""
        given = self.steps * self.micro_batches
        sizes = [BatchSize(batch, length) for length in itertools.islice(itertools.cycle(lengths), given)]
        if self.last_batch is not None:
            sizes[-1] = BatchSize(self.last_batch, sizes[-1].seq_len)
        rows = self.eval_batch_size or batch
        evaluated = tuple(
            BatchSize(rows, length) for length in itertools.islice(itertools.cycle(lengths), self.eval_batches)
        )
        for number in range(self.steps):
            micro = tuple(sizes[number * self.micro_batches : (number + 1) * self.micro_batches])
            yield Iteration(micro, evaluated if number == self.steps - 1 else ())

    def describe(self) -> list[str]:
        """The differences in words."""
        words = []
        if self.seq_lens:
            words.append(f"sequences of {', '.join(map(str, self.seq_lens))}")
        if self.last_batch is not None:
            words.append(f"last batch of {self.last_batch}")
        if self.eval_batches:
            rows = f" of {self.eval_batch_size}" if self.eval_batch_size else ""
            words.append(f"evaluation of {self.eval_batches} batch{'es' * (self.eval_batches > 1)}{rows}")
        if self.varies:
            words.append(f"epochs of {self.steps} steps")
        return words
