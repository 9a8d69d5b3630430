"""``graphmem replay``: recorded or exported allocations under another configuration or on a smaller card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphmem.base.documents import open_file, read_bounded, text_of
from graphmem.base.options import Whole, option
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Output, Target
from graphmem.cli.output import check_output, show, working
from graphmem.errors import SourceError, TraceError, UsageError
from graphmem.trace import Trace, from_json

if TYPE_CHECKING:
    from graphmem.sources.snapshot import Recording


@dataclass(frozen=True)
class Recorded:
    """Options of snapshots."""

    batch: int | None = option(None, "The batch of a run that died, to try one less.", Whole())
    snapshot_device: int | None = option(None, "Which GPU of the snapshot.", Whole(0))


@click.command("replay", cls=GroupedCommand, short_help="A recorded run on another card or allocator setting.")
@click.argument("snapshot")
@takes("target", Target)
@takes("", Recorded)
@takes("output", Output, "Output")
def replay_command(
    snapshot: str, target: Target, batch: int | None, snapshot_device: int | None, output: Output
) -> None:
    """Replay SNAPSHOT: would it have fitted, and what would have been reserved?

    SNAPSHOT is a PyTorch memory snapshot (torch.cuda.memory._dump_snapshot) or a trace of 'graphmem export-trace'. Of a
    run that ran out of memory the report says what was missing, who held the rest, and which settings would have saved
    it, each of them tried.
    """
    check_output(output.output)
    with working() as progress:
        from graphmem.analyze import replay_trace

        progress(f"reading {snapshot}")
        read = read_file(Path(snapshot), snapshot_device)
        progress("replaying")
        if isinstance(read, Trace):
            if batch is not None:
                raise UsageError("--batch is for the snapshot of a run that ran out of memory, and this one did not")
            estimate = replay_trace(read, **vars(target), top=output.top)
        else:
            from graphmem.planning.post_mortem import replay_dead

            estimate = replay_dead(read, **vars(target), batch=batch, top=output.top, say=progress)
    show(estimate, output)


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
        raise SourceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return trace_of(recording) if recording.death is None else recording


def _begins_as_json(head: bytes) -> bool:
    try:
        return text_of(head[: len(head) & ~3]).lstrip().startswith("{")  # whole characters of UTF-16 and UTF-32
    except ValueError:
        return head.lstrip().startswith(b"{")
