"""``graphmem export-trace``: the step's allocations and frees as JSON, for other tools and for ``replay``."""

from __future__ import annotations

from dataclasses import dataclass

import click

from graphmem.base.options import option, option_of
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Request, Written
from graphmem.cli.output import check_output, emit, working
from graphmem.errors import TraceError, UsageError
from graphmem.runtimes.pytorch import snapshot
from graphmem.trace import to_json


@dataclass(frozen=True)
class Exported:
    """The file that is written."""

    format: str = option(
        "json", "json, or snapshot: a pickle for https://pytorch.org/memory_viz.", choices=("json", "snapshot")
    )
    output: str | None = option(None, option_of(Written, "output"))


@click.command("export-trace", cls=GroupedCommand)
@click.argument("model")
@takes("request", Request)
@takes("", Exported)
def export_trace_command(model: str, request: Request, format: str, output: str | None) -> None:
    """Write the allocations and frees of MODEL's step as JSON (schema graphmem.trace) or as a memory snapshot.

    MODEL and the options are those of 'graphmem analyze'; 'graphmem replay' reads the result. A snapshot holds the
    addresses that PyTorch's allocator would give; drop it on https://pytorch.org/memory_viz.
    """
    check_output(output)
    as_snapshot = format == "snapshot"
    if as_snapshot and output in (None, "-"):
        raise UsageError("a snapshot is a binary file; name it with -o snapshot.pickle")
    with working() as progress:
        from graphmem.analyze import analyze

        estimate = analyze(model, **vars(request), progress=progress)
        if estimate.trace is None:
            raise TraceError("this analysis keeps no trace")
        if as_snapshot and estimate.runtime != "pytorch":
            raise UsageError(f"a snapshot is of PyTorch's allocator, and this runs under {estimate.runtime}")
        content: str | bytes = to_json(estimate.trace) + "\n"
        if as_snapshot:
            content = snapshot.render(estimate.trace, request.alloc_conf, request.torch_version)
    emit(content, output)
