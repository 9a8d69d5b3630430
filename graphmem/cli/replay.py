"""``graphmem replay``: recorded or exported allocations under another configuration or on a smaller card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from graphmem.base.options import Whole, option
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Output, Target
from graphmem.cli.output import check_output, publish, show, working


@dataclass(frozen=True)
class Recorded:
    """Options of snapshots."""

    batch: int | None = option(None, "The batch of a run that died, to try one less.", Whole())
    snapshot_device: int | None = option(None, "Which GPU of the snapshot.", Whole(0))


@click.command("replay", cls=GroupedCommand)
@click.argument("snapshot")
@takes("target", Target)
@takes("", Recorded)
@takes("output", Output, "Output")
def replay_command(
    snapshot: str, target: Target, batch: int | None, snapshot_device: int | None, output: Output
) -> None:
    """Replay SNAPSHOT: would it have fitted, and what would have been reserved?

    SNAPSHOT is a PyTorch memory snapshot (torch.cuda.memory._dump_snapshot) or a trace of 'graphmem export'. Of a
    run that ran out of memory the report says what was missing, who held the rest, and which settings would have saved
    it, each of them tried. Of a log with PyTorch's OutOfMemoryError it is what the error's words tell.
    """
    check_output(output.output, output.html)
    from graphmem.planning.explaining import logged_message

    if (logged := logged_message(Path(snapshot))) is not None:
        publish(logged, output.form, output.output)
        return
    with working() as progress:
        from graphmem.planning.recordings import replay

        given = {**vars(target), "batch": batch, "snapshot_device": snapshot_device, "top": output.top}
        estimate = replay(snapshot, **given, say=progress)
    show(estimate, output)
