"""``graphmem replay``: recorded or exported allocations under another configuration or on a smaller card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from graphmem.cli.groups import GroupedCommand
from graphmem.cli.options import output_of, output_options, target_of, target_options
from graphmem.cli.output import check_output, show, working
from graphmem.errors import SourceError, TraceError
from graphmem.trace import Trace, from_json


@click.command("replay", cls=GroupedCommand, short_help="A recorded run on another card or allocator setting.")
@click.argument("snapshot")
@target_options
@click.option("--snapshot-device", type=click.IntRange(min=0), metavar="N", help="Which GPU of the snapshot.")
@output_options
def replay_command(**options: Any) -> None:
    """Replay SNAPSHOT: would it have fitted, and what would have been reserved?

    SNAPSHOT is a PyTorch memory snapshot (torch.cuda.memory._dump_snapshot) or a trace of 'graphmem export-trace'.
    """
    output = output_of(options)
    check_output(output.output)
    target = target_of(options)
    with working() as progress:
        from graphmem.analyze import replay_trace

        progress(f"reading {options['snapshot']}")
        trace = read_trace(Path(options["snapshot"]), options["snapshot_device"])
        progress("replaying")
        estimate = replay_trace(trace, **target, top=output.top)
    show(estimate, output)


def read_trace(path: Path, device: int | None) -> Trace:
    """The trace in the file, told by its first byte: JSON begins with ``{``, anything else is a snapshot.

    Raises :class:`SourceError` or :class:`graphmem.errors.TraceError`.
    """
    try:
        with path.open("rb") as stream:
            is_json = stream.read(64).lstrip()[:1] == b"{"
        text = path.read_text(encoding="utf-8") if is_json else ""
    except UnicodeDecodeError:
        raise SourceError(f"{path} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if is_json:
        try:
            return from_json(text)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
    from graphmem.sources.snapshot import read_snapshot

    return read_snapshot(path, device=device)
