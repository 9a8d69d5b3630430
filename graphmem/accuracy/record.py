"""Records of measurements: one JSON document a line, with a schema version. Bytes are integers.

A case that ran out of memory is a record, and so is one that failed; both say so in ``status``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from graphmem.accuracy.case import Case
from graphmem.errors import GraphmemError, TraceError

SCHEMA = 1
OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"

#: Where a record comes from. The two are never mixed in a report.
GPU, STUB_DRIVER = "gpu", "stub driver"


@dataclass(frozen=True)
class Machine:
    """What a run was measured on. ``source`` is :data:`GPU` or :data:`STUB_DRIVER`; ``versions`` maps packages,
    ``driver``, ``cuda`` and ``cudnn`` to their versions."""

    source: str
    gpu: str
    capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int
    total_bytes: int
    versions: Mapping[str, str]


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
    """Peaks over the run in bytes, of PyTorch's allocator and of the card; ``retries`` after emptying the cache."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    device: DeviceUse
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
    if document.get("schema") != SCHEMA:
        raise TraceError(f"a record of schema {document.get('schema')!r}; this graphmem reads schema {SCHEMA}")
    try:
        values = {item.name: document[item.name] for item in fields(Record) if item.name in document}
        values["case"] = Case.from_json(values["case"])
        if values.get("machine") is not None:
            values["machine"] = machine_from(values["machine"])
        if values.get("measured") is not None:
            measured = dict(values["measured"])
            measured["device"] = DeviceUse(**measured["device"])
            values["measured"] = Measured(**{**measured, "iterations": tuple(measured["iterations"])})
        return Record(**values)
    except (KeyError, TypeError) as error:
        raise TraceError(f"not a record of graphmem: {error}") from None


def machine_from(document: Mapping[str, Any]) -> Machine:
    """The machine of a record. Raises ``KeyError`` or ``TypeError`` for another document."""
    return Machine(**{**document, "capability": tuple(document["capability"])})


def read_records(path: Path) -> list[Record]:
    """The records of one ``.jsonl`` file. Raises :class:`TraceError` with the line that is not one."""
    records = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            records.append(record_from(json.loads(line)))
        except (ValueError, GraphmemError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    return records


def read_folder(folder: Path) -> list[Record]:
    """The records of every ``.jsonl`` file under ``folder``, in the order of their names."""
    return [record for path in sorted(folder.rglob("*.jsonl")) for record in read_records(path)]


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a file, each line whole."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(record.to_line() + "\n")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
