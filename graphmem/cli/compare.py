"""``graphmem compare``: two reports of ``graphmem analyze --format json`` side by side."""

from __future__ import annotations

from dataclasses import dataclass

import click

from graphmem.base.options import option
from graphmem.cli.fields import takes
from graphmem.cli.options import form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish
from graphmem.planning.compare import compare
from graphmem.reports import Format
from graphmem.units import format_bytes, parse_size


@dataclass(frozen=True)
class Growth:
    """The growth that the second report may have."""

    max_growth: int | None = option(
        None, "Exit with 3 when device memory grows by more, e.g. 200MiB.", metavar="SIZE", read=parse_size
    )


@click.command("compare")
@click.argument("before")
@click.argument("after")
@form_options
@takes("", Growth)
def compare_command(before: str, after: str, max_growth: int | None, form: Format, output: str | None) -> None:
    """Compare two reports, BEFORE and AFTER, written by 'graphmem analyze --format json'.

    Exit codes: 0 done, 1 error, 2 wrong options, 3 grown by more than --max-growth.
    """
    check_output(output)
    compared = compare(before, after)
    publish(compared, form, output)
    grown = compared.growth_bytes
    if max_growth is not None and grown > max_growth:
        allowed = format_bytes(max_growth)
        click.echo(f"graphmem: device memory grew by {format_bytes(grown)}, more than --max-growth {allowed}", err=True)
        click.get_current_context().exit(DOES_NOT_FIT)
