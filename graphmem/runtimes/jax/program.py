"""A JAX program as it was followed: the functions that XLA compiled for it, and its calls, as a trace.

:mod:`graphmem.sources.jax_program` writes the document; nothing here needs JAX. At a call the client takes, for one
after the other of XLA's allocations, those that no argument brings: the outputs', the table of several outputs, and the
temporary block, in the order in which XLA numbers them (``GpuExecutable::GenerateBufferAllocations``, xla/service/gpu/
gpu_executable.cc). The table and the block go back when the call has been sent off, the next call waits for the same
stream. An output that is written over a donated argument has its memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphmem.errors import SourceError
from graphmem.runtimes.jax.assignment import Allocation, Assignment, from_document
from graphmem.trace import Category, Trace, TraceBuilder


@dataclass(frozen=True)
class Executable:
    """A compiled function. ``xla``: XLA's own figures of a call, in bytes (``memory_analysis()``)."""

    name: str
    assignment: Assignment
    xla: Mapping[str, int]


@dataclass(frozen=True)
class Program:
    """``events`` are those of the document, in order. ``reads``: how often the program read an array, and saw zeros;
    ``decisions``: how often it asked whether one is true.
    ``cards``: of how many this is one; ``is_jitted``: one function, called several times."""

    executables: tuple[Executable, ...]
    events: Sequence[Sequence[Any]]
    reads: int
    decisions: int
    cards: int
    iterations: int
    is_jitted: bool
    version: str


def read_program(document: Mapping[str, Any]) -> Program:
    """The program of a document. Raises :class:`SourceError` with the text of one that says why there is none."""
    if "error" in document:
        raise SourceError(document["error"])
    return Program(
        tuple(Executable(row["name"], from_document(row), row["xla"]) for row in document["executables"]),
        document["events"],
        document["reads"],
        document["decisions"],
        document["cards"],
        document["iterations"],
        document["jitted"],
        document["jax"],
    )


def trace_of(program: Program, name: str) -> Trace:
    """The allocations and frees of a program, up to its end."""
    followed = _Followed(program, TraceBuilder(source=name))
    for kind, *row in program.events:
        getattr(followed, kind)(*row)
    return followed.builder.build()


def returned_bytes(program: Program) -> int:
    """Bytes of the outputs of a call that take an argument's place for the next one, and have memory of their own; of
    the call that has the most."""
    sizes: dict[int, int] = {}
    calls = [0]
    for kind, *row in program.events:
        if kind == "call":
            number, _, outputs = row
            rows = program.executables[number].assignment.allocations
            own = {one.output: one.bytes for one in rows if one.output is not None and one.parameter is None}
            sizes |= {array: own.get(position, 0) for position, array in enumerate(outputs)}
        elif kind == "carry":
            calls[-1] += sizes.get(row[1], 0)
        elif kind == "iteration":
            calls.append(0)
    return max(calls)


#: What arrays are called that are what the first word of a row says; their sizes do not depend on it.
_NAMES = (
    (Category.OPTIMIZER_STATE, re.compile(r"opt(im|imizer)?_?state|\bopt\b|\bmomentum\b")),
    (Category.PARAMETER, re.compile(r"param|weight|\bmodel\b|\bvariables\b")),
)


def category_of(label: str) -> Category:
    """The purpose of an argument by its name, ``state.params['Dense_0']``: an input where that says nothing."""
    return next((category for category, names in _NAMES if names.search(label)), Category.INPUT)


class _Followed:
    """Methods are named as the events are. ``_storages``: of every array on the card, by its number."""

    def __init__(self, program: Program, builder: TraceBuilder) -> None:
        self.builder = builder
        self._program = program
        self._storages: dict[int, int] = {}
        self._words: dict[int, tuple[Category, str]] = {}  # category and label of arrays that the program was given
        self._phase = builder.phase(0, "arguments")
        self._operator = builder.operator("device_put", phase=self._phase)
        self._sent = self._operator

    def iteration(self, number: int) -> None:
        self._phase = self.builder.phase(number, "call" if self._program.is_jitted else "program")
        self._sent = self.builder.operator("device_put", phase=self._phase)
        self._operator = self._sent

    def put(self, array: int, size: int, label: str, kind: str) -> None:
        category = category_of(label) if kind == "argument" else Category.TEMPORARY
        self._words[array] = (category, label)
        self._storages[array] = self.builder.alloc(size, self._sent, category, label=label)

    def drop(self, array: int) -> None:
        storage = self._storages.pop(array, None)
        if storage is not None:
            self.builder.free(storage, self._operator)

    def call(self, number: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """One call: what is allocated for it and by it, and what goes back at its end."""
        executable = self._program.executables[number]
        self._operator = self.builder.operator(executable.name, phase=self._phase)
        held: dict[int, int] = {}
        until_its_end: list[int] = []
        for row in executable.assignment.allocations:
            storage = self._taken(executable, row, inputs)
            if row.output is not None and storage is not None:
                held[row.output] = storage
            elif row.parameter is None and storage is not None:
                until_its_end.append(storage)
        for size in executable.assignment.scratch:
            copy = self.builder.alloc(size, self._operator, Category.WORKSPACE, label=f"scratch of {executable.name}")
            self.builder.free(copy, self._operator)
        for storage in until_its_end:
            self.builder.free(storage, self._operator)
        self._storages |= {array: held[position] for position, array in enumerate(outputs) if position in held}

    def _taken(self, executable: Executable, row: Allocation, inputs: Sequence[int]) -> int | None:
        """The storage behind an allocation of a call; None for what is none on the card."""
        if row.parameter is not None:
            return self._given(executable, row, inputs[row.parameter])
        if row.kind in ("constant", "host"):
            return None
        category, label = _WORDS[row.kind]
        return self.builder.alloc(row.bytes, self._operator, category, label=label.format(executable.name))

    def _given(self, executable: Executable, row: Allocation, array: int) -> int | None:
        """The argument's storage, which leaves the array where the output is written over it."""
        if array not in self._storages:
            raise SourceError(
                f"{executable.name} is called with an array that was donated in a call before; donate it no more, or "
                "use what that call returned"
            )
        return self._storages[array] if row.output is None else self._storages.pop(array)

    def carry(self, old: int, new: int) -> None:
        """The new array is what the old one was to the program."""
        self._words[new] = words = self._words.get(old, (Category.ACTIVATION, ""))
        if new in self._storages:
            storage = self._storages[new]
            self.builder.categories[storage], self.builder.labels[storage] = words


#: Categories and labels of what a call allocates, by kind.
_WORDS = {
    "output": (Category.ACTIVATION, "output of {}"),
    "tuple": (Category.WORKSPACE, "table of outputs of {}"),
    "temporary": (Category.TEMPORARY, "temporary block of {}"),
}
