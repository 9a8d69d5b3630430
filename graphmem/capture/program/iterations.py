"""One iteration of a loop as the trace has it, to be compared with others."""

from __future__ import annotations

from typing import Any

from graphmem.trace import EventKind, Place

_SIGNS = {int(EventKind.ALLOC): 1, int(EventKind.FREE): -1}


def peak(builder: Any, row: int) -> int:
    """The most bytes on the device since a row of the trace, over those that were there."""
    held = most = 0
    for kind, subject, _, _ in builder.rows[row:]:
        if kind in _SIGNS and builder.places[subject] is Place.DEVICE:
            held += _SIGNS[kind] * builder.storage_bytes[subject]
            most = max(most, held)
    return most


def body(builder: Any, row: int, first: int, until: int | None = None) -> tuple[list[Any], int, int]:
    """One iteration of a loop, to be compared with the next one: a loop whose iterations are equal is left.

    The events on the device from a row of the trace on, storages counted from ``first``, the first that the iteration
    made, and older ones given by their bytes; the bytes that were kept there, and those kept on the host.
    """
    events: list[Any] = []
    kept = on_host = 0
    sizes, places, streams = builder.storage_bytes, builder.places, builder.streams
    for kind, subject, _, stream in builder.rows[row:until]:
        if kind > EventKind.RECORD_STREAM:
            events.append((kind, stream))
            continue
        if places[subject] is not Place.DEVICE:
            on_host += _SIGNS.get(kind, 0) * sizes[subject] if places[subject] is Place.HOST else 0
            continue
        name = subject - first if subject >= first else -sizes[subject] - 1
        if kind == EventKind.ALLOC:
            kept += sizes[subject]
            events.append((kind, sizes[subject], streams[subject]))
        elif kind == EventKind.FREE:
            kept -= sizes[subject]
            events.append((kind, name))
        else:
            events.append((kind, name, stream))
    return events, kept, on_host
