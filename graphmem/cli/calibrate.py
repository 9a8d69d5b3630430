"""``graphmem calibrate``: the constants of this machine's card, measured and kept for later estimates."""

from __future__ import annotations

import click

from graphmem.cli.options import form_options
from graphmem.cli.output import check_output, publish, working
from graphmem.devices.user_table import write_user_row
from graphmem.reports import Format
from graphmem.reports.document import Document, Facts, section
from graphmem.units import format_bytes

SCHEMA = "graphmem.calibration/1"


@click.command("calibrate")
@form_options
def calibrate_command(form: Format, output: str | None) -> None:
    """Measure what a process holds on this machine's card outside the allocator, and keep it.

    Later estimates for this card use the figures and say so; 'graphmem gpus NAME' shows them. Without a CUDA GPU it
    exits with 1.
    """
    from graphmem.accuracy.calibrate import calibrate
    from graphmem.accuracy.measure import Plan

    check_output(output)
    with working() as progress:
        progress("measuring")
        row = calibrate(Plan())
    path = write_user_row(row)
    facts = (
        ("card", row["name"]),
        ("context", f"{format_bytes(row['context_bytes'])} ({row['context_source']})"),
        ("cuBLAS workspace", format_bytes(row["cublas_workspace_bytes"])),
        ("kept in", str(path)),
    )
    document = Document("calibration", row["name"], (section("", Facts(facts)),), lambda: {"schema": SCHEMA, **row})
    publish(document, form, output)
