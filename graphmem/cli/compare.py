"""``graphmem compare``: two reports of ``graphmem analyze --format json`` side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from graphmem.cli.output import DOES_NOT_FIT, check_output, emit
from graphmem.documents import fits, read_json
from graphmem.errors import SourceError
from graphmem.estimate import LEVELS, SCHEMA, Fit
from graphmem.reports.tables import plain_table
from graphmem.reports.text import WORDS, clean
from graphmem.units import format_bytes, parse_bytes


@click.command("compare", short_help="Two reports side by side, or a growth budget in CI.")
@click.argument("before")
@click.argument("after")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="Default table.")
@click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout.")
@click.option("--max-growth", metavar="SIZE", help="Exit with 3 when device memory grows by more, e.g. 200MiB.")
def compare_command(before: str, after: str, form: str, output: str | None, max_growth: str | None) -> None:
    """Compare two reports, BEFORE and AFTER, written by 'graphmem analyze --format json'.

    Exit codes: 0 done, 1 error, 2 wrong options, 3 grown by more than --max-growth.
    """
    check_output(output)
    allowed = None if max_growth is None else parse_bytes(max_growth)
    first, second = _read(before), _read(after)
    compared: dict[str, Any] = {
        "schema": "graphmem.comparison/1",
        "before": {name: first[name] for name in ("model", "step", "runtime", "allocator", "gpu")},
        "after": {name: second[name] for name in ("model", "step", "runtime", "allocator", "gpu")},
        "fits": {"before": _fits(first), "after": _fits(second)},
        "peak": {name: _change(first["peak"], second["peak"], f"{name}_bytes") for name in LEVELS},
        "breakdown": {
            name: _change(first["breakdown"], second["breakdown"], name)
            for name in {**first["breakdown"], **second["breakdown"]}
        },
    }
    emit(json.dumps(compared, indent=2) + "\n" if form == "json" else _table(compared), output)
    if allowed is not None and compared["peak"]["device"]["change"] > allowed:
        click.get_current_context().exit(DOES_NOT_FIT)


def _read(name: str) -> dict[str, Any]:
    """The report in the file. Raises :class:`SourceError`."""
    try:
        document = read_json(Path(name))
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise SourceError(f"{name} is no report; write one with: graphmem analyze MODEL --format json -o {name}")
    try:
        figures = [document["peak"][f"{level}_bytes"] for level in LEVELS] + list(document["breakdown"].values())
        texts = [document[key] for key in ("model", "step", "runtime", "allocator", "gpu")]
        if not all(fits(figure, int) for figure in figures) or not all(isinstance(text, str) for text in texts):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise SourceError(f"{name} is a damaged report; write it again with graphmem analyze --format json") from None
    return document


def _fits(report: dict[str, Any]) -> str | None:
    """``yes``, ``no`` or ``likely, 97 %``, as the report's own verdict; None without a card. Raises
    :class:`SourceError` for one that no report has."""
    fit = report.get("fits")
    if fit is None:
        return None
    try:
        verdict, chance = fit["verdict"], fit["probability"]
        if verdict not in ("yes", "no", "likely", "likely not") or not (chance is None or 0 <= chance <= 1):
            raise TypeError
        told = Fit("", 0, 0, 0, verdict in ("yes", "likely"), probability=chance, margin=fit["margin"]).chance
    except (KeyError, TypeError):
        raise SourceError("a report's verdict is damaged; write it again with graphmem analyze --format json") from None
    return f"{verdict}, {told}" if told else verdict


def _change(first: dict[str, int], second: dict[str, int], key: str) -> dict[str, int]:
    before, after = first.get(key, 0), second.get(key, 0)
    return {"before": before, "after": after, "change": after - before}


def _table(compared: dict[str, Any]) -> str:
    lines = []
    for name in ("model", "step", "runtime", "allocator", "gpu"):
        before, after = clean(compared["before"][name]), clean(compared["after"][name])
        lines.append(f"{name:<10}{before}" if before == after else f"{name:<10}{before}\n{'':>7}-> {after}")
    if any(compared["fits"].values()):
        before, after = (compared["fits"][when] or "no card" for when in ("before", "after"))
        lines.append(f"{'fits':<10}{before}" if before == after else f"{'fits':<10}{before}\n{'':>7}-> {after}")
    titles = ("", "before>", "after>", "change>")
    peaks = [(name, *_figures(row)) for name, row in compared["peak"].items()]
    parts = [
        (WORDS.get(name, clean(name)), *_figures(row))
        for name, row in compared["breakdown"].items()
        if row["before"] or row["after"]
    ]
    return (
        "\n".join(lines)
        + f"\n\nPeak memory\n{plain_table(titles, peaks)}\nWhat it is made of at the peak\n{plain_table(titles, parts)}"
    )


def _figures(row: dict[str, int]) -> tuple[str, str, str]:
    change = row["change"]
    return format_bytes(row["before"]), format_bytes(row["after"]), ("+" if change > 0 else "") + format_bytes(change)
