"""``graphmem advise``: what would save memory, each suggestion analysed."""

from __future__ import annotations

from typing import Any

import click

from graphmem.cli.groups import GroupedCommand
from graphmem.cli.options import form_of, form_options, model_options, request_of, target_options
from graphmem.cli.output import check_output, publish, working


@click.command("advise", cls=GroupedCommand, short_help="What would save memory, each suggestion analysed.")
@model_options
@target_options
@form_options
def advise_command(**options: Any) -> None:
    """What would save memory in MODEL's step: each suggestion is analysed in full, none is a rule of thumb.

    MODEL and the options are those of 'graphmem analyze'. Lower precision and 8-bit optimizers change the results of
    training, the other suggestions do not.
    """
    check_output(options["output"])
    with working() as progress:
        from graphmem.planning.advise import advise

        advised = advise(options["model"], say=progress, **request_of(options))
    publish(advised, form_of(options), options["output"])
