"""``graphmem pack``: which jobs share which card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from graphmem.base.figures import parse_margin
from graphmem.base.options import REQUIRED, option
from graphmem.base.tables import toml_in
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.cli.sweep import settings_in
from graphmem.devices.prices import card_prices
from graphmem.errors import UsageError
from graphmem.reports import Format
from graphmem.units import parse_size


@dataclass(frozen=True)
class Cards:
    """The cards, and how they are filled."""

    gpus: str = option(REQUIRED, "The cards, as 4xA100-80GB,8xT4; a MIG slice is a card by its name.", metavar="CARDS")
    margin: float = option(
        1.0,
        "Fill cards by what processes need in this share of runs, as p95. Default: in all.",
        read=parse_margin,
        metavar="SHARE",
    )
    prices: str | None = option(
        None, "Use the cheapest cards, by a file of prices: T4 = 0.35, or CSV. Default: the fewest.", metavar="FILE"
    )


@click.command("pack", cls=GroupedCommand, short_help="Which jobs share which card.")
@click.argument("jobs", type=click.Path(path_type=Path))
@takes("cards", Cards, "Cards")
@form_options
def pack_command(jobs: Path, cards: Cards, form: Format, output: str | None) -> None:
    """Share the jobs of a TOML file out among cards: as few cards as will do.

    A job names a model as 'graphmem analyze' takes it, with options that --vary of 'graphmem sweep' knows, or the
    memory that it needs. For example:

    \b
      [[job]]
      name = "tagger"
      model = "hf:bert-base-uncased"
      batch = 16
      count = 4
    \b
      [[job]]
      name = "other people's"
      memory = "9GiB"

    Every process has a context of its own on its card. Exit codes: 0 done, 1 error or a wrong value, 2 options that
    cannot be read, 3 where processes find no room.
    """
    check_output(output)
    read = read_jobs(jobs)
    with working() as progress:
        from graphmem.planning.layouts.pack import Job, pack

        prices = {} if cards.prices is None else card_prices(Path(cards.prices))
        jobs_read = [Job(**one) for one in read]
        found = pack(jobs_read, cards.gpus.split(","), margin=cards.margin, prices=prices, say=progress)
    publish(found, form, output)
    if found.left_out:
        click.get_current_context().exit(DOES_NOT_FIT)


def read_jobs(path: Path) -> list[dict[str, Any]]:
    """The jobs of a file, as arguments of :class:`graphmem.planning.layouts.pack.Job`. Raises :class:`UsageError`."""
    tables = toml_in(path).get("job")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path} has no table [[job]]")
    return [_job(path, number, table) for number, table in enumerate(tables, 1)]


def _job(path: Path, number: int, table: dict[str, Any]) -> dict[str, Any]:
    rest = dict(table)
    found: dict[str, Any] = {
        "name": str(rest.pop("name", f"job {number}")),
    }
    try:
        for name in ("model", "count"):
            if name in rest:
                found[name] = rest.pop(name)
        if "memory" in rest:
            found["memory_bytes"] = parse_size(str(rest.pop("memory")))
        found["settings"] = settings_in(rest)
    except UsageError as error:
        raise UsageError(f"{path}, job {found['name']!r}: {error}") from None
    return found
