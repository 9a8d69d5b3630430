"""The protocol of a runtime, built in or from elsewhere, and the values of its questions and answers.

A runtime takes a trace, of a captured step or of a graph it plans itself, and gives what its allocator does with it on
a card. It is one file or one folder of this package, or an object that an installed package names under the entry-point
group ``graphmem.runtimes``; nothing outside of it knows its name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from graphmem.allocators.base import Allocator, SegmentView
from graphmem.base.figures import Cause, Figure, unknown
from graphmem.base.records import dataclass
from graphmem.devices import Device
from graphmem.diagnostics import Diagnostic
from graphmem.errors import UsageError
from graphmem.estimate import MEANINGS, Findings
from graphmem.graph.model import Graph
from graphmem.replay import Replay, replay, replay_kept
from graphmem.trace import Trace

if TYPE_CHECKING:
    from graphmem.capture.ports import DeviceMemory

Options = TypeVar("Options")

#: How many times a planned graph runs by default: the second run finds the arena that the first one left.
GRAPH_RUNS = 2


class Graphs(Enum):
    """How a runtime runs an ONNX graph."""

    #: By a plan of its own: :meth:`Runtime.plan`.
    PLANNED = "planned"
    #: As PyTorch's operators, captured; it can train it, too.
    CAPTURED = "captured"
    #: Not at all.
    REFUSED = "refused"


@dataclass(frozen=True)
class Setting:
    """The setting in which options are read: the card, the version of PyTorch, (major, minor), that is predicted, and
    the cuDNN that is asked, None for none."""

    device: Device
    torch_version: tuple[int, int]
    cudnn: str | Path | None = None


@dataclass(frozen=True)
class Taken:
    """A trace as a runtime takes it, with what that assumes, for the reader.

    ``findings`` finds further remarks on the run under some options; it is called when somebody looks.
    ``doubts``: why the runtime's own part in it may be otherwise; ``outside``: what its libraries hold beside the
    allocator. ``proven``: the recordings that the trace was compared with, but for ``doubts``; "" for none,
    and then all of it is in doubt.
    """

    trace: Trace
    assumptions: tuple[str, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    findings: Callable[[Any], Findings] | None = None
    doubts: tuple[Cause, ...] = ()
    outside: tuple[Figure, ...] = ()
    proven: str = ""


@dataclass(frozen=True)
class Runs:
    """A trace on a card: ``main`` gives the figures; ``limited``, if there is one, is the same trace on the card's own
    memory, which shows whether that is enough. ``diagnostics`` and ``details`` are for the reader; ``doubts``: why
    another run of the same may differ, and ``find_doubts`` finds more such causes when somebody asks. ``segments_at``:
    the allocator's segments after an event of this run, where the same trace would not be run the same again."""

    main: Replay
    limited: Replay | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    doubts: tuple[Cause, ...] = ()
    find_doubts: Callable[[], Iterable[Cause]] = tuple
    segments_at: Callable[[int], Sequence[SegmentView]] | None = None

    @property
    def on_card(self) -> Replay:
        """The run as it goes on the card where it fits there, else as it would go without a limit."""
        return self.main if self.limited is None or self.limited.out_of_memory is not None else self.limited


@dataclass(frozen=True)
class Change:
    """Options that may take less memory: in words, and as the whole text of ``--alloc-conf``."""

    words: str
    alloc_conf: str


@runtime_checkable
class Runtime(Protocol[Options]):
    """A framework that executes models. ``Options`` is the type of its options, any hashable one; equal ones are the
    same run."""

    #: As on the command line and in reports: lower case, letters and digits only.
    name: str
    #: As its makers write it.
    title: str
    #: Other names that are accepted, written as ``name`` is.
    spellings: tuple[str, ...] = ()
    #: (level, what it means) in the runtime's own words, in the order of :data:`graphmem.estimate.LEVELS`.
    levels: Sequence[tuple[str, str]] = MEANINGS
    graphs: Graphs = Graphs.REFUSED
    #: Whether it takes the trace of a captured step.
    captures: bool = True
    #: The recordings that its allocator was compared with; "" for none, and then every figure is in doubt.
    proven: str = ""
    #: Whether settings of the step, such as its precision or its optimizer, are worth advice.
    step_advice: bool = False

    @abstractmethod
    def parse(self, text: str | None, setting: Setting) -> Options:
        """The options that ``text`` gives by their native names, and, where the runtime reads any, the environment.

        Raises :class:`~graphmem.errors.UsageError` that lists what is accepted.
        """

    @abstractmethod
    def describe(self, options: Options, setting: Setting) -> str:
        """The allocator under these options, in one line."""

    @abstractmethod
    def run(self, trace: Trace, options: Options, setting: Setting) -> Runs:
        """The work of the allocator on ``trace``, which :meth:`take` or :meth:`plan` gave. Every call starts anew."""

    def told_apart(self, trace: Trace, options: Options) -> Hashable:
        """Equal for options under which runs of this trace, and of its events with some storages empty, are the same
        where no card's memory limits them; None where that is not known."""
        return None

    def take(self, trace: Trace) -> Taken:
        """A captured trace, with what the runtime would allocate besides."""
        return Taken(trace)

    def live(self, options: Options, setting: Setting, *, room: int) -> DeviceMemory | None:
        """The allocator that answers a captured program while it runs, on the card of ``setting``; ``room`` times its
        memory limits it, 0: nothing does. None: the program's questions have no answer, and are answered by zeros."""
        return None

    def recorded_options(self, notes: Mapping[str, str]) -> str | None:
        """The options that a recorded trace with these notes ran under, as :meth:`parse` reads them."""
        return None

    def plan(self, sessions: Sequence[Sequence[Graph]], options: Options, iterations: int | None) -> Taken:
        """The trace of running graphs, for a runtime that plans them: for each session the shapes of its runs in order.

        ``iterations`` None stands for :data:`GRAPH_RUNS`. Raises :class:`~graphmem.errors.GraphmemError`.
        """
        raise UsageError(f"{self.title} plans no graphs; accepted: a captured step")

    def plan_options(self, options: Options) -> Hashable:
        """The part of the options that :meth:`plan` looks at: equal parts give equal plans. All of them by default."""
        return repr(options)

    def optimization(self, options: Options) -> tuple[str | None, str]:
        """(level, provider) that ONNX Runtime optimizes a graph for while it is loaded; no level: left as it is."""
        return None, "cpu"

    def changes(self, alloc_conf: str | None, device: Device) -> Iterator[Change]:
        """Options that are worth a try where memory is short on the card, beside those given."""
        return iter(())


def doubts_of(runtime: Runtime[object], taken: Taken) -> tuple[Cause, ...]:
    """Why the runtime's part in the figures may be otherwise: its own doubts, and the parts that it does not prove."""
    parts = ((runtime.proven, "allocator"), (taken.proven, "trace"))
    doubted = [f"its {part}" for proof, part in parts if not proof]
    if not doubted:
        return taken.doubts
    source = f"{' and '.join(doubted)}: it names no recordings that they were compared with"
    return (unknown(f"the runtime {runtime.name}", source, below=True), *taken.doubts)


def within_card(trace: Trace, make: Callable[[int | None], Allocator], device: Device, rules: Hashable = None) -> Runs:
    """``trace`` without a limit and, where that exceeds the card, once more within the card. A program that dealt with
    its limit, by going on after it was refused memory or by setting a fraction, runs within the card alone.

    ``make`` gives a fresh allocator for a capacity in bytes, None for no limit; one without a limit depends on the
    ``rules`` alone, where they are given.
    """
    room = max(0, device.capacity_bytes - device.taken_bytes)
    if trace.refused or trace.fractions:
        within = replay(trace, make(room))
        if within.out_of_memory is None:
            return Runs(within, within)
    free = replay(trace, make(None)) if rules is None else replay_kept(trace, rules, lambda: make(None))
    if free.out_of_memory is not None:  # a limit of the allocator's own, such as gpu_mem_limit
        return Runs(free, free)
    if free.peak_reserved_bytes + device.taken_bytes <= device.capacity_bytes and not trace.fractions:
        return Runs(free)
    return Runs(free, replay(trace, make(room)))
