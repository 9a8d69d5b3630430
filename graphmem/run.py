"""The run: a step as it was captured, or planned by a runtime, with all that is known of how it went.

A run is built once, where it ends, and read everywhere behind it: by the cache that keeps it for the next question, by
the stages that replay and judge it, by the reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from graphmem.base.figures import Communicator
from graphmem.base.records import dataclass
from graphmem.diagnostics import Diagnostic
from graphmem.trace import Trace

if TYPE_CHECKING:
    from torch import fx

    from graphmem.base.textbook import Sharded
    from graphmem.cudnn.library import Cudnn, CudnnAnswers
    from graphmem.runtimes.base import Taken
    from graphmem.training.program import Ending, EpochRead, ItemRun, LibraryFunction

#: An output with a smaller share of the reserved bytes cannot matter: nobody asks what a loop takes that drops it, or
#: holds it.
SMALL_OUTPUT = 1 / 1000


@dataclass(frozen=True)
class RunMode:
    """The way a run is made. A run that turns out not to serve is made once more, with less of this
    (:mod:`graphmem.answering.retries`)."""

    room: int = 0  # requests beyond so many times the memory of the card are refused; 0: none is
    shortens: bool = False  # of long generations only some tokens are followed
    ends_alike_loops: bool = True  # loops without training end once their iterations are alike
    opens: tuple[LibraryFunction, ...] = ()  # whose loops end as the program's own do
    covers_both_loops: bool = False  # one run gives the traces of both graphmem.training.LOOPS, where it can
    remark: str = ""  # why it is made so, for the reader


@dataclass(frozen=True)
class Run:
    """One run of a step. Diagnostics are counted: diagnostic -> how often."""

    trace: Trace
    model: str = ""  # its name
    runtime: str = ""  # that is natural to the model
    step: str = ""  # in words
    notes: tuple[str, ...] = ()  # remarks for the reader
    planned: Taken | None = None  # the trace as the runtime that planned it takes it; None of a captured step
    recorded: Mapping[str, int] | None = None  # figures of a recording that comes from elsewhere; None of other runs
    # What was not certain:
    assumed: Mapping[Diagnostic, int] = field(default_factory=dict)  # what had to be assumed, or is not modelled
    decided: Mapping[Diagnostic, int] = field(default_factory=dict)  # assumed values that decide, and their lines
    refusals: tuple[Diagnostic, ...] = ()  # who was refused memory
    with_room: Run | None = None  # the run where all of that is served, of one that went on with less
    card_answers: Mapping[str, Hashable] = field(default_factory=dict)  # facts of the card that the step's code asked
    limit: Hashable = None  # what decided when memory ran out, where the run could be refused some
    captured_at: float | None = None  # seconds since 1970, of one that was on the disk
    # What was run:
    is_own_step: bool = False  # the program, or the factory, ran all iterations itself
    ending: Ending | None = None  # of a whole program
    items: tuple[ItemRun, ...] = ()  # of its loops around training, which were runs of their own
    epochs: tuple[EpochRead, ...] = ()  # whose batches were read beyond those that its steps took
    sandbox: Mapping[str, Any] = field(default_factory=dict)  # what a whole program would have done to files
    installed_version: tuple[int, int] = (0, 0)  # of the PyTorch that ran it
    cudnn: Cudnn | CudnnAnswers | None = None  # that was asked for plans of convolutions
    graph: fx.Graph | None = None  # the operators, if they were asked for
    weights: tuple[str, ...] = ()  # dtypes of the model's parameters, those of the most bytes first
    optimizer: str = ""
    output_bytes: int = 0  # the most that an output has which only a variable of the loop can hold
    loop: str = ""  # of graphmem.training.LOOPS; "" of a run without one
    # One process of several:
    groups: tuple[tuple[int, ...], ...] = ()  # ranks of each process group of several that it was in
    communicators: tuple[Communicator, ...] = ()  # of the groups that were used
    sharded: Sharded | None = None  # how the model that is trained is shared out
    # Other runs:
    other_loop: Run | None = None  # with the other one of graphmem.training.LOOPS, where one run gave both
    lacks_own_loop: bool = False  # it followed the other loop than the one that was asked for
    lacks_iterations: bool = False  # of a loop that was ended early
    left_in: tuple[LibraryFunction, ...] = ()  # whose loops the program was left in
    gone_on_in: tuple[LibraryFunction, ...] = ()  # whose loops were left, and the program went on behind them
