"""The run: a step as it was captured, or planned by a runtime, with all that is known of how it went.

A run is built once, where it ends, and read everywhere behind it: by the cache that keeps it for the next question, by
the stages that replay and judge it, by the reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphmem.figures import Communicator
from graphmem.textbook import Sharded
from graphmem.trace import Trace

if TYPE_CHECKING:
    from graphmem.cudnn.library import Cudnn
    from graphmem.runtimes.base import Taken
    from graphmem.training.program import Ending


@dataclass(frozen=True)
class RunMode:
    """How a run is made. A run that turns out not to serve is made once more, with less of this
    (:mod:`graphmem.retries`)."""

    #: Requests beyond the memory of the card are refused, as they are there.
    limited: bool = False
    #: Of long generations only some tokens are followed.
    shortens: bool = False
    #: Loops without training end once their iterations are alike.
    leaves_alike: bool = True
    #: One run of the default step gives the traces of both :data:`graphmem.training.LOOPS`, where it can.
    covers_both_loops: bool = False
    #: Why it is made so, for the reader.
    remark: str = ""


@dataclass(frozen=True)
class Run:
    """One run of a step. Messages are counted: message -> how often."""

    trace: Trace
    #: The step in words.
    step: str = ""
    #: Remarks for the reader.
    notes: tuple[str, ...] = ()
    #: What the runtime that planned it says of it; None of a captured step.
    planned: Taken | None = None

    # --- what was not certain ---
    #: What had to be assumed, and what is not modelled.
    assumed: Mapping[str, int] = field(default_factory=dict)
    #: Assumed values that decide sizes or branches, with the lines that read them.
    decided: Mapping[str, int] = field(default_factory=dict)
    #: Who was refused memory and went on.
    refusals: tuple[str, ...] = ()
    #: What the step's own code asked the card about itself, and the answers.
    card_answers: Mapping[str, Any] = field(default_factory=dict)
    #: What decided when memory ran out, where the run could be refused some.
    limit: Hashable = None

    # --- what was run ---
    #: The program, or the factory, ran all iterations itself.
    is_own_step: bool = False
    #: How a whole program ended, and what it would have done to files.
    ending: Ending | None = None
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    #: The version of PyTorch that ran it, (major, minor).
    installed_version: tuple[int, int] = (0, 0)
    #: The cuDNN that was asked for plans of convolutions.
    cudnn: Cudnn | None = None
    #: The operators as a ``torch.fx.Graph``, if that was asked for.
    graph: Any = None
    #: The dtypes of the model's weights, those of the most bytes first.
    weights: tuple[str, ...] = ()
    optimizer: str = ""
    #: The largest bytes of an output of the model that only a variable of the loop can hold.
    output_bytes: int = 0

    # --- one process of several ---
    #: The ranks of each process group of several that it was in.
    groups: tuple[tuple[int, ...], ...] = ()
    #: Those of the groups that were used.
    communicators: tuple[Communicator, ...] = ()
    #: How the model that is trained is shared out.
    sharded: Sharded | None = None

    # --- other runs ---
    #: The same step with the other one of :data:`graphmem.training.LOOPS`, where one run gave both.
    other_loop: Run | None = None
    #: It followed the other loop than the one that was asked for.
    lacks_own_loop: bool = False
    #: The iterations of a loop that was ended early are missed.
    lacks_iterations: bool = False
