"""``graphmem advise``: suggestions that would save memory, each analysed."""

from __future__ import annotations

import click

from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Request, form_options
from graphmem.cli.output import check_output, publish, working
from graphmem.reports import Format
from graphmem.workers import Workers


@click.command("advise", cls=GroupedCommand)
@click.argument("model", shell_complete=models)
@takes("request", Request)
@takes("workers", Workers, "Workers")
@form_options
def advise_command(model: str, request: Request, workers: Workers, form: Format, output: str | None) -> None:
    """Changes that would save memory in MODEL's step: each suggestion is analysed in full, none is a rule of thumb.

    MODEL and the options are those of 'graphmem analyze'. Lower precision and 8-bit optimizers change the results of
    training, the other suggestions do not.
    """
    check_output(output)
    with working() as progress:
        from graphmem.planning.advise import advise

        advised = advise(model, say=progress, steps=form.name == "html", **vars(workers), **vars(request))
    publish(advised, form, output)
