"""``graphmem export-trace``: the step's allocations and frees as JSON, for other tools and for ``replay``."""

from __future__ import annotations

from typing import Any

import click

from graphmem.cli.groups import GroupedCommand
from graphmem.cli.options import model_options, request_of, target_options
from graphmem.cli.output import check_output, emit, working
from graphmem.errors import TraceError
from graphmem.trace import to_json


@click.command("export-trace", cls=GroupedCommand, short_help="The allocations and frees of a step as JSON.")
@model_options
@target_options
@click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout.")
def export_trace_command(**options: Any) -> None:
    """Write the allocations and frees of MODEL's step as JSON (schema graphmem.trace/1).

    MODEL and the options are those of 'graphmem analyze'; 'graphmem replay' reads the result.
    """
    check_output(options["output"])
    request = request_of(options)
    with working() as progress:
        from graphmem.analyze import analyze

        estimate = analyze(options["model"], **request, progress=progress)
        if estimate.trace is None:
            raise TraceError("this analysis keeps no trace")
        content = to_json(estimate.trace)
    emit(content + "\n", options["output"])
