"""A whole program, as a command line starts it: its file or module, its arguments, and its place among processes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from graphmem.base.addresses import refuse_address
from graphmem.base.records import public_value
from graphmem.errors import UsageError

#: Optimizer steps after which a program is left: the second has the optimizer's state and reuses the segments of the
#: first, the third finds the rare step whose fragmentation still grows.
OPTIMIZER_STEPS = 3
#: Events of a program that is followed to its end instead: some seconds (as measured: 58,000 of a VQGAN's in 4.5 s of
#: processor time, a thousand tiny steps in 12).
SHORT_EVENTS = 50_000
#: The batches of an epoch that are looked at: those of :data:`EPOCH_BATCHES` and :data:`EPOCH_NUMBERS`, the first ones
#: alone, or all.
EPOCHS = ("auto", "first", "all")
#: Batches of all epochs of a program that are read unasked, and the numbers in them: 1 GiB of ``float32``. A count, and
#: no time: the same program has the same figures on every machine.
EPOCH_BATCHES, EPOCH_NUMBERS = 1000, 1 << 28


class Steps(NamedTuple):
    """How far a program is followed: the ``wanted`` steps of each optimizer, and to its end if all its steps are at
    most so many ``events`` (allocations and frees)."""

    wanted: int = OPTIMIZER_STEPS
    events: int = SHORT_EVENTS


@public_value(frozen=True, slots=True)
class DataSet:
    """A data set of ``rows``, each of ``tokens`` in all its ``columns`` together."""

    rows: int
    tokens: int
    columns: tuple[str, ...] = ("text",)


def parse_data_set(text: str) -> DataSet:
    """``rows=1000,tokens=512``, with ``columns=prompt+completion`` if need be. Raises :class:`UsageError`."""
    match = re.fullmatch(r"rows=([1-9][0-9]{0,6}),tokens=([1-9][0-9]{0,6})(?:,columns=(\w+(?:\+\w+)*))?", text)
    if match is None:
        raise UsageError(f"--dataset {text!r} cannot be read; write rows=1000,tokens=512, with ,columns=messages or "
                         "other names of columns joined by + where the program reads others than text")  # fmt: skip
    return DataSet(int(match[1]), int(match[2]), tuple((match[3] or "text").split("+")))


@public_value(frozen=True, slots=True)
class Program:
    """``python target arguments``, ``python -m target arguments``, or ``python -c target arguments``; a notebook
    (``.ipynb``) is the program of its cells.

    ``job`` is the one of a program that runs itself for many settings (Hydra's multirun). ``environment``: variables
    that the launcher adds; ``epoch``: which batches of an epoch are looked at, one of :data:`EPOCHS` or ``sample N``;
    ``vocab`` and ``dataset``: the sizes of tokenizers and data sets that are named and not there.

    Raises :class:`UsageError` for a target that cannot be one.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    is_code: bool = False
    job: int = 0
    epoch: str = "auto"
    vocab: int | None = None
    dataset: DataSet | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(f"{'|'.join(EPOCHS)}|sample [1-9][0-9]{{0,8}}", self.epoch):
            raise UsageError(f"--epoch is {self.epoch!r}; accepted: {', '.join(EPOCHS)}, 'sample N'")
        if self.is_code:
            return
        if not self.target.strip() or "\0" in self.target:
            raise UsageError(f"{self.target!r} is not the name of a program; write graphmem run train.py")
        if self.is_module:
            if not all(part.isidentifier() for part in self.target.split(".")):
                raise UsageError(f"{self.target!r} is not the name of a module; write graphmem run -m package.module")
            return
        path = Path(self.target)
        try:
            found = path.exists()
        except OSError as error:
            raise UsageError(f"{self.target}: {error.strerror}") from None
        if not found:
            refuse_address(self.target)
            raise UsageError(f"{self.target} does not exist; for a module, write graphmem run -m package.module")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError(f"{self.target} is a directory without a __main__.py; name the file that is to run")

    @property
    def name(self) -> str:
        """The program in words: ``train.py``, ``-m package.train``, ``-c ...``."""
        return f"-m {self.target}" if self.is_module else "-c ..." if self.is_code else self.target

    @property
    def words(self) -> str:
        """The program with its arguments, as a shell takes them: ``train.py --batch-size 16``."""
        return " ".join([self.name, *map(shlex.quote, self.arguments)])


@public_value(frozen=True, slots=True)
class ItemRun:
    """An item of a loop around training, which was a run of its own: ``where`` the loop is (``train.py:12``), the
    ``item`` for people, the rows of the trace from ``first`` to before ``end``."""

    where: str
    item: str
    first: int
    end: int


@public_value(frozen=True, slots=True)
class LibraryFunction:
    """A function of an installed package: its ``file``, its qualified ``name``, its first ``line``."""

    file: str
    name: str
    line: int


@public_value(frozen=True, slots=True)
class EpochRead:
    """The batches of one epoch: ``read`` so many, all if it is ``whole``, of ``shapes`` different kinds; ``smallest``,
    ``median`` and ``largest`` count the numbers in a batch; ``analysed`` were given to the program after those that
    its steps took."""

    where: str
    read: int
    whole: bool
    shapes: int
    smallest: int
    median: int
    largest: int
    analysed: int


@public_value(frozen=True, slots=True)
class Ending:
    """The end of a program's run, after ``steps`` optimizer steps.

    ``how``: ``shortened`` (its loops were ended, and what follows them ran), ``left`` (in the middle of a loop that
    could not be ended), ``itself``, ``exit`` (``sys.exit`` with ``code``; ``error`` is the text that it was given
    instead), ``raised`` (``error``: its place and message), ``memory`` (raised because the card refused it some),
    ``unfollowed`` (graphmem failed there, and not the program: it has no answer to what was asked, or the statement
    passes on the host). ``jobs``: the settings of all jobs, of which one ran; ``more``: why there were more steps than
    were asked for.
    """

    how: str
    steps: int
    code: int = 0
    error: str = ""
    jobs: tuple[str, ...] = ()
    more: str = ""

    @property
    def failed(self) -> bool:
        """True if Python would have ended with another status than 0."""
        return self.how in ("raised", "memory", "unfollowed") or self.code != 0

    def words(self) -> str:
        """The ending as a sentence without a full stop."""
        steps = f"{self.steps} optimizer step{'' if self.steps == 1 else 's'}"
        if self.how == "unfollowed":
            return f"graphmem's limit, not your program's, after {steps}: {self.error}"
        if self.how == "memory":
            return f"the program ran out of memory after {steps}: {self.error}"
        if self.how == "raised":
            return f"the program raised an error after {steps}: {self.error}"
        if self.how == "exit":
            given = f": {self.error}" if self.error else ""
            return f"the program called sys.exit({'...' if self.error else self.code}) after {steps}{given}"
        if self.how == "shortened":
            return f"the program's loops were ended after {steps}, and what follows them was run"
        if self.how == "left":
            return f"the program was left after {steps}, and what it does later was not seen"
        return f"the program ran to its end, with {steps}"
