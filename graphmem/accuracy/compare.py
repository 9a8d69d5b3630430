"""Records compared with predictions made now."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphmem.accuracy.case import Case
from graphmem.accuracy.coverage import Interval, Judged, intervals
from graphmem.accuracy.record import OK, Machine, Record
from graphmem.accuracy.tensorflow_replay import replayed_peaks
from graphmem.answering.question import Question
from graphmem.answering.stages import estimate_of
from graphmem.devices import Device, described_device, device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Peak
from graphmem.labels import ESTIMATES
from graphmem.trace import Trace
from graphmem.workers import Workers

#: Compute capability of a machine whose card has no part in a run.
_NO_CARD = (0, 0)
#: Iterations and precision aside, a capped run may take this much more than the estimate, as the literature allows.
CAP_SLACK = 0.01


@dataclass(frozen=True)
class Predicted:
    """graphmem's prediction of a case: peaks in bytes, how often it met something it does not model, the largest
    buffer whose size is an estimate, and the workspaces at the peak. Or the error of the analysis. ``replayed`` are the
    allocated and reserved peaks of the recorded allocations in graphmem's allocator, where they lie beside the record.
    ``intervals``: how far each level is known.
    """

    peak: Peak | None = None
    unknown: int = 0
    estimated_buffer_bytes: int = 0
    workspace_bytes: int = 0
    error: str = ""
    trace: Trace | None = None
    replayed: tuple[int, int] | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A record and its prediction. Errors are relative to the measured value; positive says too much."""

    record: Record
    predicted: Predicted

    @property
    def is_comparable(self) -> bool:
        """Whether both sides have figures."""
        return self.record.measured is not None and self.record.status == OK and self.predicted.peak is not None

    def error(self, level: str) -> float:
        """The signed relative error of ``requested``, ``allocated``, ``reserved`` or ``device``."""
        measured = self.measured_bytes(level)
        return (self.predicted_bytes(level) - measured) / measured if measured else 0.0

    def measured_bytes(self, level: str) -> int:
        """The measured peak; on the device level what the process added to the card's use."""
        measured = self.record.measured
        assert measured is not None
        if level == "device":
            return measured.device.peak_bytes - measured.device.baseline_bytes if measured.device is not None else 0
        return int(getattr(measured, f"{level}_bytes") or 0)

    def predicted_bytes(self, level: str) -> int:
        """The predicted peak."""
        assert self.predicted.peak is not None
        return int(getattr(self.predicted.peak, f"{level}_bytes"))

    def judged(self, level: str) -> Judged:
        """The measured level beside the interval of the prediction."""
        return Judged(self.predicted.intervals[level], self.measured_bytes(level), self.predicted_bytes(level))

    @property
    def exceeds_cap(self) -> bool:
        """Whether a run limited to the estimate and 1 % more would not have had what it reserved without a limit."""
        return self.measured_bytes("reserved") > (1 + CAP_SLACK) * self.predicted_bytes("reserved")


def compare(
    records: Sequence[Record],
    workers: Workers | None = None,
    progress: Callable[[int], None] | None = None,
    predict_one: Callable[[Record], Predicted] | None = None,
) -> list[Comparison]:
    """Predict every record's case on its own card and PyTorch version, or have ``predict_one`` do it; by ``workers``,
    else here. Results keep the records' order; a case whose workers died of it has that as its error."""
    comparisons = []
    found = (workers or Workers()).map(predict_one or predict_record, records, _seconds)
    for record, one in zip(records, found, strict=True):
        predicted = Predicted(error=str(one)) if isinstance(one, GraphmemError) else one
        comparisons.append(Comparison(record, predicted))
        if progress is not None:
            progress(len(comparisons))
    return comparisons


def _seconds(record: Record) -> float:
    """A case that took long to measure takes long to predict: the same model, the same operators."""
    return record.seconds


def predict_record(record: Record) -> Predicted:
    """The prediction of a record's case on its own card and PyTorch version, and the replay of what it recorded."""
    if record.machine is None:
        return Predicted(error="the record does not say on which card")
    predicted = predict(record.case, record.machine)
    if record.case.runtime == "tensorflow" and record.trace:
        try:
            return replace(predicted, replayed=replayed_peaks(Path(record.trace)))
        except GraphmemError as error:
            return replace(predicted, error=str(error))
    return predicted


def predict(case: Case, machine: Machine, *, keep_trace: bool = False) -> Predicted:
    """The prediction of a case on a card. An error of the analysis is part of the answer."""
    try:
        question = Question(
            case.model,
            batch=case.batch,
            seq_len=case.seq_len,
            training=case.step,
            iterations=case.iterations,
            runtime=case.runtime,
            shapes=case.shapes or None,
            device=device_of(machine) if machine.capability != _NO_CARD else None,
            alloc_conf=case.alloc_conf,
            torch_version=_release(machine.versions.get("torch", "")),
            top=0,
        )
        estimate = estimate_of(question)
    except GraphmemError as error:
        return Predicted(error=str(error))
    storages = estimate.trace.storages if estimate.trace is not None else ()
    guessed = [storage.bytes for storage in storages if storage.label in ESTIMATES]
    unknown = sum(item.count for item in estimate.diagnostics if item.kind == "unknown")
    trace = estimate.trace if keep_trace else None
    workspaces = estimate.breakdown.get("WORKSPACE", 0)
    largest = max(guessed, default=0)
    return Predicted(estimate.peak, unknown, largest, workspaces, trace=trace, intervals=intervals(estimate))


def device_of(machine: Machine) -> Device:
    """The card of a record: as the table knows it, with the multiprocessors of the record."""
    try:
        known = device_named(machine.gpu)
    except UsageError:
        described = described_device(
            machine.gpu, machine.capability, machine.total_bytes, machine.sm_count, machine.threads_per_sm
        )
        return replace(described, capacity_source="measured")
    return known


def _release(version: str) -> str | None:
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else None
