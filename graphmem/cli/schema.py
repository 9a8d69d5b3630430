"""``graphmem schema``: the JSON Schemas of answers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click

from graphmem.base.options import option, option_of
from graphmem.cli.fields import takes
from graphmem.cli.options import Written
from graphmem.cli.output import check_output, emit
from graphmem.reports.schemas import names, schema_of


@dataclass(frozen=True)
class Destination:
    """The file that is written."""

    output: str | None = option(None, option_of(Written, "output"))


@click.command("schema")
@click.argument("name", required=False)
@takes("", Destination)
def schema_command(name: str | None, output: str | None) -> None:
    """Print the JSON Schema of the document NAME, as an answer's key "schema" has it (graphmem.estimate/1, or
    estimate), to check what --format json gives. Without NAME, the names."""
    check_output(output)
    emit(
        "".join(f"{one}\n" for one in names()) if name is None else json.dumps(schema_of(name), indent=2) + "\n",
        output,
    )
