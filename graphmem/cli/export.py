"""``graphmem export``: the run of a step as files for others' viewers, for other tools and for ``replay``."""

from __future__ import annotations

from dataclasses import dataclass

import click

from graphmem.base.options import described, option, option_of
from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Request, Written
from graphmem.cli.output import check_output, emit, working
from graphmem.errors import UsageError
from graphmem.exports import EXPORTS, Asked, Export, export_named
from graphmem.reports.tables import TABLES


def _asked(name: object, file: object) -> Export:
    """The format of this name, else that of the file. An unknown name is a wrong option."""
    try:
        return export_named(None if name is None else str(name), None if file is None else str(file))
    except UsageError as error:
        raise click.BadParameter(str(error), click.get_current_context(), param_hint="--format") from None


_FORMAT = described(
    f"{', '.join(EXPORTS.own())}, or a plug-in's. Default: by the end of FILE's name, else json.",
    flags="--format",
    metavar="NAME",
    make=lambda given: _asked(given["format"], given["output"]),
)


@dataclass(frozen=True)
class Exported:
    """The file that is written."""

    form: Export = option(EXPORTS.named("json"), _FORMAT)
    table: str = option("storages", "Which table, of csv and parquet.", choices=tuple(TABLES))
    output: str | None = option(None, option_of(Written, "output"))


@click.command("export", cls=GroupedCommand)
@click.argument("model", shell_complete=models)
@takes("request", Request)
@takes("", Exported)
def export_command(model: str, request: Request, form: Export, table: str, output: str | None) -> None:
    """Write the run of MODEL's step for another program.

    json: its allocations and frees, which 'graphmem replay' reads (schema graphmem.trace). snapshot: with the addresses
    that PyTorch's allocator would give, for https://pytorch.org/memory_viz. perfetto: levels, phases, modules and
    operators for https://ui.perfetto.dev. speedscope: the peak by module and by source line, for
    https://www.speedscope.app. csv, parquet: a table. MODEL and the other options are those of 'graphmem analyze'.
    """
    check_output(output)
    if form.is_binary and output in (None, "-"):
        raise UsageError(f"{form.name} is a binary file; name it with -o FILE{(*form.suffixes, '')[0]}")
    with working() as progress:
        from graphmem.analyze import analyze

        estimate = analyze(model, **vars(request), progress=progress)
        content = form.render(estimate, Asked(request.alloc_conf, request.torch_version, table))
    emit(content, output)
    if estimate.card_assumed:
        click.echo(f"graphmem: the step is one on {estimate.gpu}, as no --gpu was given", err=True)
