"""The same loops under a capture."""

from __future__ import annotations

from graphmem.capture.fakes import PretendDevice
from graphmem.capture.session import Session, capture
from graphmem.trace import EventKind, Place
from graphmem.units import GIB
from tests.loops import runner
from tests.loops.cases import Case


def predict(case: Case, place: Place = Place.DEVICE) -> list[int]:
    """Allocations (positive bytes) and frees (negative) of the loop, in order. Raises what a capture raises."""
    marks: list[int] = []

    def step(session: Session) -> None:
        runner.warm_up()
        runner.run(case, lambda: marks.append(len(session.recorder.builder.rows)))

    device = PretendDevice(runner.NAME, runner.CAPABILITY, 80 * GIB, runner.MULTIPROCESSORS, runner.THREADS)
    trace = capture(step, source=case.name, device=device, torch_version=(2, 13), cudnn_workspaces=False).trace
    changes = []
    for kind, subject in list(zip(trace.kinds.tolist(), trace.subjects.tolist(), strict=True))[slice(*marks)]:
        storage = trace.storages[subject]
        if kind in (EventKind.ALLOC, EventKind.FREE) and storage.place == place and storage.bytes:
            changes.append(storage.bytes if kind == EventKind.ALLOC else -storage.bytes)
    return changes
