"""``graphmem explain``: what is known of an operator of PyTorch."""

from __future__ import annotations

from typing import Any

import click

from graphmem.cli.options import form_of, form_options
from graphmem.cli.output import check_output, publish


@click.command("explain", short_help="What is known of an operator of PyTorch.")
@click.argument("names", nargs=-1, required=True, metavar="OPERATOR...")
@form_options
def explain_command(names: tuple[str, ...], **options: Any) -> None:
    """What graphmem knows of operators (aten.index_put_, or of one overload aten.add.Tensor): kernel rule, shapes,
    composition, and where each is written."""
    check_output(options["output"])
    from graphmem.explain import document

    publish(document(names), form_of(options), options["output"])
