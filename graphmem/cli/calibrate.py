"""``graphmem calibrate``: the constants of this machine's card, measured and kept for later estimates."""

from __future__ import annotations

import click

from graphmem.cli.output import working
from graphmem.devices.user_table import write_user_row
from graphmem.units import format_bytes


@click.command("calibrate", short_help="Measure this machine's card once, for later estimates.")
def calibrate_command() -> None:
    """Measure what a process holds on this machine's card outside the allocator, and keep it.

    Later estimates for this card use the figures and say so; 'graphmem gpus NAME' shows them. Without a CUDA GPU it
    exits with 1.
    """
    from graphmem.accuracy.calibrate import calibrate
    from graphmem.accuracy.measure import Plan

    with working() as progress:
        progress("measuring")
        row = calibrate(Plan())
    path = write_user_row(row)
    click.echo(f"{row['name']}: context {format_bytes(row['context_bytes'])} ({row['context_source']})")
    click.echo(f"cuBLAS workspace {format_bytes(row['cublas_workspace_bytes'])}")
    click.echo(f"kept in {path}")
