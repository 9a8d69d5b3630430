"""``graphmem compare``: two reports of ``graphmem analyze --format json`` side by side."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click

from graphmem.base.options import option
from graphmem.cli.fields import takes
from graphmem.cli.options import form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish
from graphmem.errors import UsageError
from graphmem.planning.compare import compare
from graphmem.reports import Format
from graphmem.units import format_bytes, parse_size


def read_growth(text: str) -> int | float:
    """Bytes, or a share of the first report's."""
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?%", text.strip()):
        return float(text.strip().rstrip("%")) / 100
    if re.fullmatch(r"[0-9]{1,5}(\.[0-9]+)?", text.strip()):
        raise UsageError(f"--max-growth {text}: a share or a size? Write {text}% or {text}MiB")
    return parse_size(text)


@dataclass(frozen=True)
class Growth:
    """The growth that the second report may have."""

    max_growth: int | float | None = option(
        None, "Exit with 3 when device memory grows by more, e.g. 200MiB or 5%.", metavar="SIZE", read=read_growth
    )


@click.command("compare")
@click.argument("before")
@click.argument("after")
@form_options
@takes("", Growth)
def compare_command(before: str, after: str, max_growth: int | float | None, form: Format, output: str | None) -> None:
    """Compare two reports, BEFORE and AFTER, written by 'graphmem analyze --format json'.

    Exit codes: 0 done, 1 error or a wrong value, 2 options that cannot be read, 3 grown by more than --max-growth.
    """
    check_output(output)
    compared = compare(before, after)
    publish(compared, form, output)
    allowed = None if max_growth is None else compared.growth_over(max_growth)
    if allowed is not None:
        grown = format_bytes(compared.growth_bytes)
        click.echo(f"graphmem: device memory grew by {grown}, more than --max-growth {format_bytes(allowed)}", err=True)
        click.get_current_context().exit(DOES_NOT_FIT)
