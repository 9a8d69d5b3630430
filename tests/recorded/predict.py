"""The cases under a capture."""

from __future__ import annotations

from collections.abc import Callable

from graphmem.capture.session.session import Session, capture
from graphmem.trace import EventKind, Place
from tests.recorded.device import CARD, TORCH_VERSION, warm_up


def predicted_changes(
    run: Callable[[Callable[[], None]], None],
    name: str,
    place: Place = Place.DEVICE,
    *,
    cudnn_workspaces: bool = True,
    data_dependent: float | None = None,
) -> list[int]:
    """Bytes allocated and, negative, freed between two calls of the function that ``run`` is given, in order.

    Raises what a capture raises.
    """
    marks: list[int] = []

    def step(session: Session) -> None:
        warm_up()
        run(lambda: marks.append(len(session.recorder.builder.rows)))

    trace = capture(
        step,
        source=name,
        device=CARD,
        torch_version=TORCH_VERSION,
        cudnn_workspaces=cudnn_workspaces,
        data_dependent=data_dependent,
    ).trace
    changes = []
    for kind, subject in list(zip(trace.kinds.tolist(), trace.subjects.tolist(), strict=True))[slice(*marks)]:
        storage = trace.storages[subject]
        if kind in (EventKind.ALLOC, EventKind.FREE) and storage.place == place and storage.bytes:
            changes.append(storage.bytes if kind == EventKind.ALLOC else -storage.bytes)
    return changes
