"""XLA's assignment of buffers for one compiled function, from the texts that XLA itself writes
(``--xla_dump_hlo_as_text``): what a call allocates in which order, and how its temporary block is filled.

The texts are those of jaxlib 0.10: ``*-buffer-assignment.txt`` (allocations, and the values in each),
``*-buffer-assignment-values.txt`` (where else a value appears, and the instruction that makes it),
``*-live-range.txt`` (when it lives) and ``*gpu_after_optimizations.txt`` (the compiled module). They are read as data,
line by line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from graphmem.errors import SourceError

_ALLOCATION = re.compile(r"allocation (\d{1,9}): size (\d{1,18})(.*)$")
_VALUE = re.compile(r" value: <(\d{1,9}) (.+?) @\d+> \(size=(\d{1,18}),offset=(\d{1,18})\): (.*)$")
_PARAMETER = re.compile(r"\bparameter (\d{1,6})\b")
_DEFINED = re.compile(r"<(\d{1,9}) .+ @\d+>$")
_POSITION = re.compile(r"  (\S+?)(?: ?\{(\d{0,9})\})?$")
_RANGE = re.compile(r"    (.+?)\{([\d,]*)\}:(\d{1,9})-(\d{1,9})$")
_OPERATOR = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d{1,9})")
#: Kinds of allocations, in the order in which the words of a line decide.
_KINDS = ((", color 5,", "host"), ("constant", "constant"), ("preallocated-temp", "temporary"))
#: Operators whose memory only their library knows, or of which there are several kinds, by the words of a module.
KINDS = {
    "product": "__triton_nested_gemm_fusion|__triton_gemm|__cublas",
    "convolution": r"__cudnn\$conv",
    "transform": r" fft\(",
    "collective": r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(",
    "solver": 'custom_call_target="cu(solver|sparse)',
}
_REAL_TRANSFORM = re.compile(r" = (f32|f64)\[(\d{1,12}(?:,\d{1,12}){0,9})\]\S* fft\(.*fft_type=IRFFT")
_SORT = re.compile(r" = \(?\w+\[((?:\d{1,12}(?:,\d{1,12}){0,9})?)\].* sort\(")
#: Elements of a sort that XLA leaves as it is (``SortRewriter``, xla/service/gpu/transforms/sort_rewriter.h).
_SMALL_SORT = 16384
_COMPLEX_BYTES = {"f32": 8, "f64": 16}
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)$")
_FILE, _LOCATION = (
    re.compile(r'(\d{1,9}) "(.*)"$'),
    re.compile(r"(\d{1,9}) \{file_name_id=(\d{1,9}) .*?\bline=(\d{1,9})"),
)
_STACK_FRAME = re.compile(r"(\d{1,9}) \{file_location_id=(\d{1,9})")
#: Values of the temporary block that are named.
_NAMED = 10
#: More than any step has; a text with more is not read.
_MOST_LINES = 20_000_000


@dataclass(frozen=True)
class Value:
    """A value inside of an allocation; ``name`` as XLA writes it, with its index in a tuple: ``fusion.3{1}``."""

    number: int
    name: str
    bytes: int
    offset: int
    shape: str


@dataclass(frozen=True)
class Allocation:
    """One allocation of a call, in bytes. ``kind``: ``parameter``, ``output``, ``tuple`` (the table of several
    outputs), ``temporary``, ``constant`` (of the compiled module) or ``host`` (in the host's memory).

    ``parameter``: the number of the argument that brings it. ``output``: the position of the output that leaves with
    it; one that has both is an argument that is written over.
    """

    bytes: int
    kind: str
    parameter: int | None = None
    output: int | None = None


@dataclass(frozen=True)
class Assignment:
    """What a call allocates, ``allocations`` in XLA's own order, which is the order of the requests.

    ``values``: the largest of those that fill the temporary block at its fullest moment, as (bytes, operator, source
    line, shape); ``filled_bytes`` is the sum of all of them. ``scratch``: what its operators take besides, one after
    the other, each while it runs; ``kinds``: keys of :data:`KINDS` that are there, and ``sort``, of many elements.
    ``other_temporary_bytes``: the size of the block where products are cuBLAS's, not Triton's; 0 where there are none.
    """

    allocations: tuple[Allocation, ...]
    values: tuple[tuple[int, str, str, str], ...] = ()
    filled_bytes: int = 0
    scratch: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    other_temporary_bytes: int = 0

    @property
    def temporary_bytes(self) -> int:
        """The size of the temporary block."""
        return sum(one.bytes for one in self.allocations if one.kind == "temporary")

    def document(self) -> dict[str, Any]:
        """The assignment, ready for JSON."""
        rows = [[one.bytes, one.kind, one.parameter, one.output] for one in self.allocations]
        return {
            "allocations": rows,
            "values": [list(one) for one in self.values],
            "filled_bytes": self.filled_bytes,
            "scratch": list(self.scratch),
            "kinds": list(self.kinds),
            "other_temporary_bytes": self.other_temporary_bytes,
        }


def from_document(document: Mapping[str, Any]) -> Assignment:
    """The assignment that :meth:`Assignment.document` wrote."""
    rows = tuple(Allocation(*row) for row in document["allocations"])
    values = tuple(tuple(row) for row in document["values"])
    return Assignment(
        rows,
        values,
        document["filled_bytes"],
        tuple(document["scratch"]),
        tuple(document["kinds"]),
        document["other_temporary_bytes"],
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def read_assignment(assignment: str, values: str, ranges: str, module: str) -> Assignment:
    """The assignment of four texts of XLA, the last of which is the compiled module. Raises :class:`SourceError` for
    texts that are none."""
    heads, inside = _read_allocations(assignment)
    defined = _read_values(values)
    outputs = _outputs(heads, inside, defined)
    allocations = tuple(
        _allocation(head, outputs.get(number)) for number, head in heads.items() if "thread-local" not in head[1]
    )
    temporary = [value for number, head in heads.items() if "preallocated-temp" in head[1] for value in inside[number]]
    filled, fullest = _fullest(temporary, _read_ranges(ranges))
    named = sorted(fullest, key=lambda value: -value.bytes)[:_NAMED]
    frames = _read_frames(module)
    rows = tuple(_named(value, defined, frames) for value in named)
    kinds = tuple(kind for kind, words in KINDS.items() if re.search(words, module))
    sorts = any(map(_is_large_sort, _lines(module)))
    scratch = tuple(filter(None, map(_copied, _lines(module))))
    return Assignment(allocations, rows, filled, scratch, (*kinds, *["sort"] * sorts))


def _lines(text: str) -> Iterator[str]:
    if text.count("\n") > _MOST_LINES:
        raise SourceError(f"XLA's assignment of buffers has more than {_MOST_LINES:,} lines; give a smaller step")
    return iter(text.splitlines())


def _read_allocations(text: str) -> tuple[dict[int, tuple[int, str]], dict[int, list[Value]]]:
    """By number of allocation (bytes, words), and the values in it."""
    heads: dict[int, tuple[int, str]] = {}
    inside: dict[int, list[Value]] = {}
    for line in _lines(text):
        if line.startswith("Total bytes used"):
            break
        if head := _ALLOCATION.match(line):
            number = int(head[1])
            heads[number], inside[number] = (int(head[2]), head[3]), []
        elif (value := _VALUE.match(line)) and heads:
            inside[number].append(Value(int(value[1]), value[2], int(value[3]), int(value[4]), value[5]))
    if not heads:
        raise SourceError("XLA wrote an assignment of buffers that graphmem cannot read; it reads that of jaxlib 0.10")
    return heads, inside


@dataclass
class _Defined:
    """Where a value appears, as (instruction, output position of it; None for the whole), and the text of the
    instruction that makes it."""

    positions: list[tuple[str, int | None]]
    instruction: str = ""


def _read_values(text: str) -> dict[int, _Defined]:
    found: dict[int, _Defined] = {}
    last, section = None, ""
    for line in _lines(text):
        if head := _DEFINED.match(line):
            last = found[int(head[1])] = _Defined([])
        elif last is None:
            continue
        elif line.startswith(" from instruction: "):
            last.instruction = line.partition(": ")[2]
        elif line.startswith(" ") and line[1:2] != " ":
            section = line.strip()
        elif section == "positions:" and (position := _POSITION.match(line)):
            last.positions.append((position[1], int(position[2]) if position[2] else None))
    return found


def _outputs(
    heads: Mapping[int, tuple[int, str]], inside: Mapping[int, Sequence[Value]], defined: Mapping[int, _Defined]
) -> dict[int, int]:
    """The position of the output that each allocation leaves with, by its number."""
    roots = {
        value.name.removesuffix("{}")
        for number, (_, words) in heads.items()
        if _is_tuple(words)
        for value in inside[number]
    }
    alive = [number for number, (_, words) in heads.items() if "maybe-live-out" in words and not _is_tuple(words)]
    if not roots:
        return dict.fromkeys(alive, 0)
    found = {}
    for number in alive:
        for value in inside[number]:
            for name, position in defined[value.number].positions if value.number in defined else ():
                if name in roots and position is not None:
                    found[number] = position
    return found


def _is_tuple(words: str) -> bool:
    return "output shape is |(" in words


def _allocation(head: tuple[int, str], output: int | None) -> Allocation:
    size, words = head
    parameter = _PARAMETER.search(words)
    if parameter:
        return Allocation(size, "parameter", int(parameter[1]), output)
    if _is_tuple(words):
        return Allocation(size, "tuple")
    kind = next((kind for word, kind in _KINDS if word in words), "output" if output is not None else "temporary")
    return Allocation(size, kind, None, output)


# --- what operators take besides --------------------------------------------------------------------------------------


def _copied(line: str) -> int:
    """Bytes that a line's operator takes while it runs. cuFFT writes over the input of a transform to real numbers, so
    that one is copied (``CudaFft::DoFftInternal``, xla/stream_executor/cuda/cuda_fft.cc)."""
    found = _REAL_TRANSFORM.search(line)
    if found is None:
        return 0
    *others, last = map(int, found[2].split(","))
    return math.prod(others) * (last // 2 + 1) * _COMPLEX_BYTES[found[1]]


def _is_large_sort(line: str) -> bool:
    found = _SORT.search(line)
    return found is not None and math.prod(map(int, filter(None, found[1].split(",")))) > _SMALL_SORT


# --- the temporary block ----------------------------------------------------------------------------------------------


def _read_ranges(text: str) -> dict[str, tuple[int, int]]:
    """First and last moment of every value, by name."""
    found = {}
    lines = _lines(text)
    for line in lines:
        if line.strip() == "BufferLiveRange:":
            break
    for line in lines:
        part = _RANGE.match(line)
        if part is None:
            break
        found[f"{part[1]}{{{part[2]}}}"] = (int(part[3]), int(part[4]))
    return found


def _fullest(values: Iterable[Value], ranges: Mapping[str, tuple[int, int]]) -> tuple[int, list[Value]]:
    """Bytes in use at the fullest moment of a block, and the values that live then. Values at one place are one."""
    known = [(ranges[name], value) for value in values if (name := _with_index(value.name)) in ranges]
    changes = sorted(
        change
        for (first, last), value in known
        for change in ((first, 0, value.offset, value.bytes), (last, 1, value.offset, value.bytes))
    )
    at: dict[tuple[int, int], int] = {}
    now = most = moment = 0
    for when, ends, *place in changes:
        key = (place[0], place[1])
        at[key] = at.get(key, 0) + (-1 if ends else 1)
        now += (-key[1] if at[key] == 0 else 0) if ends else (key[1] if at[key] == 1 else 0)
        if now > most:
            most, moment = now, when
    alive = {(value.offset, value.bytes): value for (first, last), value in known if first <= moment <= last}
    return most, list(alive.values())


def _with_index(name: str) -> str:
    return name if name.endswith("}") else f"{name}{{}}"


def _named(value: Value, defined: Mapping[int, _Defined], frames: Mapping[int, str]) -> tuple[int, str, str, str]:
    text = defined[value.number].instruction if value.number in defined else ""
    operator, frame = _OPERATOR.search(text), _FRAME.search(text)
    source = frames.get(int(frame[1]), "") if frame else ""
    return value.bytes, operator[1] if operator else value.name, source, value.shape.partition("{")[0]


def _read_frames(module: str) -> dict[int, str]:
    """Source lines by number of stack frame, from the tables at the head of a module's text."""
    table, files, lines, frames = "", dict[int, str](), dict[int, str](), dict[int, str]()
    for line in _lines(module):
        if line.startswith(("%", "ENTRY")):
            break
        if _TABLE.match(line):
            table = line
        elif table == "FileNames" and (row := _FILE.match(line)):
            files[int(row[1])] = PurePath(row[2]).name
        elif table == "FileLocations" and (row := _LOCATION.match(line)):
            lines[int(row[1])] = f"{files.get(int(row[2]), '?')}:{row[3]}"
        elif table == "StackFrames" and (row := _STACK_FRAME.match(line)):
            frames[int(row[1])] = lines.get(int(row[2]), "")
    return frames
