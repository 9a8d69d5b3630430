"""``graphmem export-trace``: the step's allocations and frees as JSON, for other tools and for ``replay``."""

from __future__ import annotations

from typing import Any

import click

from graphmem.cli.groups import GroupedCommand
from graphmem.cli.options import model_options, request_of, target_options
from graphmem.cli.output import check_output, emit, working
from graphmem.errors import TraceError, UsageError
from graphmem.runtimes.pytorch import snapshot
from graphmem.trace import to_json


@click.command("export-trace", cls=GroupedCommand, short_help="The allocations and frees of a step as JSON.")
@model_options
@target_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "snapshot"]),
    default="json",
    help="json (default), or snapshot: a pickle for https://pytorch.org/memory_viz.",
)
@click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout.")
def export_trace_command(**options: Any) -> None:
    """Write the allocations and frees of MODEL's step as JSON (schema graphmem.trace) or as a memory snapshot.

    MODEL and the options are those of 'graphmem analyze'; 'graphmem replay' reads the result. A snapshot holds the
    addresses that PyTorch's allocator would give; drop it on https://pytorch.org/memory_viz.
    """
    check_output(options["output"])
    as_snapshot = options["form"] == "snapshot"
    if as_snapshot and options["output"] in (None, "-"):
        raise UsageError("a snapshot is a binary file; name it with -o snapshot.pickle")
    request = request_of(options)
    with working() as progress:
        from graphmem.analyze import analyze

        estimate = analyze(options["model"], **request, progress=progress)
        if estimate.trace is None:
            raise TraceError("this analysis keeps no trace")
        if as_snapshot and estimate.runtime != "pytorch":
            raise UsageError(f"a snapshot is of PyTorch's allocator, and this runs under {estimate.runtime}")
        content: str | bytes = to_json(estimate.trace) + "\n"
        if as_snapshot:
            content = snapshot.render(estimate.trace, request["alloc_conf"], request["torch_version"])
    emit(content, options["output"])
