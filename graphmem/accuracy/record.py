"""Records of measurements: one JSON document a line, with a schema version. Bytes are integers.

A case that ran out of memory is a record, and so is one that failed; both say so in ``status``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from graphmem.accuracy.case import Case
from graphmem.accuracy.kept import read
from graphmem.base.documents import check_fields, parse_json, read_lines, shown
from graphmem.errors import GraphmemError, TraceError

SCHEMA = 2
#: Characters of the longest line; the published ones have some thousands.
_LONGEST_LINE = 16 << 20
#: Schemas that can be read. The first one knew PyTorch alone: every case ran there, on a card.
_READABLE = (1, SCHEMA)
OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"

#: Where a record comes from. No two are ever mixed in a report.
GPU, STUB_DRIVER = "gpu", "stub driver"
ONNXRUNTIME_CPU, TENSORFLOW_CPU = "onnxruntime on the CPU", "tensorflow on the CPU"


@dataclass(frozen=True)
class Machine:
    """The machine that a run was measured on. ``source`` is :data:`GPU` or another constant beside it; ``versions``
    maps packages, ``driver``, ``cuda`` and ``cudnn`` to their versions. On a CPU ``gpu`` names it, and the figures of a
    card are 0."""

    source: str
    gpu: str
    capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int
    total_bytes: int
    versions: Mapping[str, str]

    @classmethod
    def of_cpu(cls, source: str, cpu: str, versions: Mapping[str, str]) -> Machine:
        """A machine whose card, if any, has no part in it."""
        return cls(source, cpu, (0, 0), 0, 0, 0, versions)


@dataclass(frozen=True)
class DeviceUse:
    """Memory of the whole card in use, in bytes: before the process used it, with its context, after the first
    iteration, and the most seen at the end of an iteration. ``meter`` is ``nvml`` or ``cudaMemGetInfo``."""

    meter: str
    baseline_bytes: int
    context_bytes: int
    first_iteration_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Measured:
    """Peaks over the run in bytes, of the runtime's allocator and of the card; ``retries`` after emptying the cache.

    The arenas of ONNX Runtime and TensorFlow do not count what was requested, and a CPU's have no card: None.
    """

    requested_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    device: DeviceUse | None
    iterations: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True)
class Record:
    """One measured case. ``cap_bytes`` is the limit on reserved memory it ran under, if any."""

    case: Case
    status: str
    machine: Machine | None = None
    measured: Measured | None = None
    error: str = ""
    date: str = ""
    seconds: float = 0.0
    cap_bytes: int | None = None
    trace: str = ""
    schema: int = field(default=SCHEMA)

    def to_line(self) -> str:
        """One line of a records file."""
        document = {key: value for key, value in asdict(self).items() if key != "case"}
        return json.dumps({"schema": document.pop("schema"), "case": self.case.to_json(), **document})


def record_from(document: Mapping[str, Any]) -> Record:
    """The record of one parsed line. Raises :class:`TraceError` for another schema or a missing field."""
    if not isinstance(document, Mapping):
        raise TraceError(f"not a record of graphmem: {shown(document)}")
    if document.get("schema") not in _READABLE:
        schema = shown(document.get("schema"))
        raise TraceError(f"a record of schema {schema}; this graphmem reads schemas 1 to {SCHEMA}")
    try:
        values = {item.name: document[item.name] for item in fields(Record) if item.name in document}
        values["schema"] = SCHEMA
        values["case"] = Case.from_json(values["case"])
        for name, kind in (("machine", Machine), ("measured", Measured)):
            if values.get(name) is not None:
                values[name] = read(kind, values[name])
        check_fields(Record, values)
        return Record(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"not a record of graphmem: {error}") from None


def read_records(path: Path) -> list[Record]:
    """The records of one ``.jsonl`` file. Raises :class:`TraceError` with the line that is not one."""
    records = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            records.append(record_from(parse_json(line)))
        except (ValueError, GraphmemError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    return records


def read_folder(folder: Path) -> list[Record]:
    """The records of every ``.jsonl`` file under ``folder``, in the order of their names."""
    return [record for path in sorted(folder.rglob("*.jsonl")) for record in read_located(path)]


def read_located(path: Path) -> list[Record]:
    """The records of one file, their ONNX graphs found beside it where they lie there. Raises :class:`TraceError`."""
    return [_located(record, path.parent) for record in read_records(path)]


def _located(record: Record, folder: Path) -> Record:
    """The record with the paths of its graph and its recorded allocations, where they lie in ``folder``."""
    graph, trace = folder / record.case.model, folder / record.trace
    if record.case.model.endswith(".onnx") and _exists(graph):
        record = replace(record, case=replace(record.case, model=str(graph)))
    return replace(record, trace=str(trace)) if record.trace and _exists(trace) else record


def _exists(path: Path) -> bool:
    """Whether the file is there; names that are too long, or hold a NUL, are of none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a file, each line whole."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(record.to_line() + "\n")


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from read_lines(path, _LONGEST_LINE)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
