"""The cases under a capture."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from graphmem.capture.session.session import Session, capture
from graphmem.cudnn.library import Cudnn
from graphmem.diagnostics import Diagnostic
from graphmem.trace import EventKind, Place, Trace
from tests.recorded.device import CARD, TORCH_VERSION, warm_up


def predicted_changes(
    run: Callable[[Callable[[], None]], None],
    name: str,
    place: Place = Place.DEVICE,
    **options: Any,
) -> list[int]:
    """Bytes allocated and, negative, freed between two calls of the function that ``run`` is given, in order.
    ``options`` are those of :func:`predicted`. Raises what a capture raises.
    """
    return predicted(run, name, place, **options)[0]


def predicted(
    run: Callable[[Callable[[], None]], None],
    name: str,
    place: Place = Place.DEVICE,
    *,
    cudnn_workspaces: bool = True,
    data_dependent: float | None = None,
    cudnn: Cudnn | None = None,
) -> tuple[list[int], dict[Diagnostic, int]]:
    """The same with what the capture says that it assumed or does not know, and how often."""
    marks: list[int] = []

    def step(session: Session) -> None:
        warm_up()
        warm_up()  # as often as the recorder: nodes are numbered
        run(lambda: marks.append(len(session.recorder.builder.rows)))

    captured = capture(
        step,
        source=name,
        device=CARD,
        torch_version=TORCH_VERSION,
        cudnn_workspaces=cudnn_workspaces,
        data_dependent=data_dependent,
        cudnn=cudnn,
    )
    return _changes(captured.trace, slice(*marks), place), dict(captured.assumed)


def predicted_together(
    runs: Sequence[Callable[[Callable[[], None]], None]],
    name: str,
    *,
    cudnn_workspaces: bool = True,
    torch_version: tuple[int, int] = TORCH_VERSION,
) -> list[list[int] | None]:
    """Several in one capture, which saves setting up one for each; None for those that raise. Nothing is selected."""
    marks: list[list[int]] = [[] for _ in runs]

    def step(session: Session) -> None:
        warm_up()
        for run, own in zip(runs, marks, strict=True):
            with contextlib.suppress(Exception):
                run(functools.partial(_mark, session, own))

    trace = capture(
        step,
        source=name,
        device=CARD,
        torch_version=torch_version,
        cudnn_workspaces=cudnn_workspaces,
        data_dependent=0.0,
    ).trace
    return [_changes(trace, slice(*own), Place.DEVICE) if len(own) == 2 else None for own in marks]


def _mark(session: Session, marks: list[int]) -> None:
    marks.append(len(session.recorder.builder.rows))


def _changes(trace: Trace, part: slice, place: Place) -> list[int]:
    changes = []
    for kind, subject in zip(trace.kinds[part].tolist(), trace.subjects[part].tolist(), strict=True):
        storage = trace.storages[subject]
        if kind in (EventKind.ALLOC, EventKind.FREE) and storage.place == place and storage.bytes:
            changes.append(storage.bytes if kind == EventKind.ALLOC else -storage.bytes)
    return changes
