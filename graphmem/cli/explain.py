"""``graphmem explain``: the known facts of an operator of PyTorch."""

from __future__ import annotations

import click

from graphmem.cli.options import form_options
from graphmem.cli.output import check_output, publish
from graphmem.reports import Format


@click.command("explain")
@click.argument("names", nargs=-1, required=True, metavar="OPERATOR...")
@form_options
def explain_command(names: tuple[str, ...], form: Format, output: str | None) -> None:
    """The facts known of operators (aten.index_put_, or of one overload aten.add.Tensor): kernel rule, shapes,
    composition, and where each is written."""
    check_output(output)
    from graphmem.explain import document

    publish(document(names), form, output)
