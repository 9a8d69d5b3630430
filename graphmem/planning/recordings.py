"""Recorded runs, read from files and replayed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from graphmem.answering.runs import Progress, silent
from graphmem.base.addresses import refuse_address
from graphmem.base.documents import open_file, read_bounded, text_of
from graphmem.base.spellings import also_named
from graphmem.devices import Device, device_named
from graphmem.errors import SourceError, TraceError, UsageError
from graphmem.estimate import Estimate
from graphmem.trace import Trace, from_json

if TYPE_CHECKING:
    from graphmem.sources.snapshot import Recording


@also_named("device", "gpu")
def replay(
    path: str | PathLike[str],
    *,
    runtime: str | None = None,
    device: str | Device | None = None,
    alloc_conf: str | None = None,
    torch_version: str | None = None,
    batch: int | None = None,
    snapshot_device: int | None = None,
    top: int = 10,
    margin: str | None = None,
    say: Progress = silent,
) -> Estimate:
    """Replay a PyTorch memory snapshot or a trace of ``graphmem export``, as ``graphmem replay`` does.

    ``batch``: that of a run that died, to try one less; ``snapshot_device``: which GPU of the snapshot; the others are
    those of :func:`graphmem.analyze`. Of a run that ran out of memory ``details["out_of_memory"]`` says what killed it
    and what would have saved it. Raises :class:`GraphmemError`.
    """
    say(f"reading {path}")
    read = read_file(Path(path), snapshot_device)
    say("replaying")
    card = device_named(device) if isinstance(device, str) else device
    if not isinstance(read, Trace):
        from graphmem.planning.post_mortem import replay_dead

        return replay_dead(
            read, device=card, alloc_conf=alloc_conf, torch_version=torch_version, runtime=runtime,
            batch=batch, top=top, margin=margin, say=say,
        )  # fmt: skip
    if batch is not None:
        raise UsageError("--batch is for the snapshot of a run that ran out of memory, and this one did not")
    from graphmem.analyze import replay_trace

    return replay_trace(
        read, runtime=runtime, device=card, alloc_conf=alloc_conf, torch_version=torch_version, top=top, margin=margin
    )


def read_file(path: Path, device: int | None) -> Trace | Recording:
    """The trace in the file or pipe, known by its beginning: JSON begins with ``{``, anything else is a snapshot; of a
    snapshot of a run that ran out of memory, the recording.

    Raises :class:`SourceError` or :class:`graphmem.errors.TraceError`.
    """
    from graphmem.sources.snapshot import recording_in, trace_of

    try:
        with open_file(path) as file:
            if _begins_as_json(file.peek(64)[:64]):
                return from_json(read_bounded(file))
            recording = recording_in(file, device)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        refuse_address(str(path))
        raise SourceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return trace_of(recording) if recording.death is None else recording


def _begins_as_json(head: bytes) -> bool:
    try:
        return text_of(head[: len(head) & ~3]).lstrip().startswith("{")  # whole characters of UTF-16 and UTF-32
    except ValueError:
        return head.lstrip().startswith(b"{")
