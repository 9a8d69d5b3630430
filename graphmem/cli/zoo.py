"""``graphmem zoo``: the models that come with graphmem, listed, analysed all at once, or exported to ONNX."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

from graphmem.cli.options import form_of, form_options
from graphmem.cli.output import check_output, publish
from graphmem.cli.progress import progress_bar
from graphmem.estimate import LEVELS
from graphmem.reports.document import Column, Document, Table, Text, Value, section

SCHEMA = "graphmem.zoo/1"
_STEPS = {"training": ("training",), "inference": ("inference",), "both": ("training", "inference")}


@click.group("zoo", invoke_without_command=True, short_help="The models that come with graphmem.")
@click.option("--family", metavar="NAME", help="Only this family, e.g. Llama.")
@form_options
@click.pass_context
def zoo_command(context: click.Context, /, family: str | None, **options: Any) -> None:
    """List the models of the zoo; 'graphmem analyze zoo:NAME' and 'graphmem measure zoo:NAME' take any of them."""
    if context.invoked_subcommand is not None:
        return
    from graphmem.sources.zoo import zoo_entries

    check_output(options["output"])
    entries = [entry for entry in zoo_entries() if family is None or entry.family.lower() == family.lower()]
    columns = (
        *(Column(title, wraps=False) for title in ("name", "family", "library")),
        Column("batch", "count"), Column("tokens", "figure"), Column("usual step", wraps=False),
    )  # fmt: skip
    rows = [(e.name, e.family, e.library, e.batch, str(e.length or "-"), _step_words(e.name)) for e in entries]
    sections = (section("", Table(columns, rows)), section("", Text([f"{len(entries)} models."])))
    data = {"schema": SCHEMA, "models": [asdict(entry) for entry in entries]}
    publish(Document("zoo", "The zoo", sections, lambda: data), form_of(options), options["output"])


@zoo_command.command("analyze")
@click.argument("names", nargs=-1)
@click.option("--step", type=click.Choice(list(_STEPS)), default="both", help="Default both.")
@click.option("--gpu", metavar="NAME", help="The card; see 'graphmem gpus'.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes at a time. Default: the CPU's cores.")
@form_options
def analyze_zoo(names: tuple[str, ...], step: str, gpu: str | None, jobs: int | None, **options: Any) -> None:
    """Analyse NAMES, or the whole zoo, each model with its usual batch and step; exit with 1 if one fails."""
    from graphmem.accuracy.case import zoo_cases
    from graphmem.accuracy.survey import survey

    check_output(options["output"])
    cases = zoo_cases(names, _STEPS[step])
    results = []
    with progress_bar("analysing", len(cases)) as advance:
        for result in survey(cases, gpu, jobs or os.cpu_count() or 1):
            results.append(result)
            advance(result.case.name)
    levels = (Column(level, "bytes") for level in LEVELS[1:])
    columns = (
        Column("case", wraps=False), *levels, Column("not modelled", "figure"), Column("time", "figure"),
        Column("RAM", "bytes"),
    )  # fmt: skip
    sections = (section("", Table(columns, [_survey_row(result) for result in results])),)
    data = {
        "schema": SCHEMA,
        "analyses": [{**asdict(result), "case": result.case.to_json()} for result in results],
    }
    publish(Document("zoo", "Analyses of the zoo", sections, lambda: data), form_of(options), options["output"])
    failed = [result for result in results if result.error]
    for result in failed:
        click.echo(f"graphmem: {result.case.name}: {result.error}", err=True)
    if failed:
        click.get_current_context().exit(1)


@zoo_command.command("export")
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("-b", "--batch", type=click.IntRange(min=1), metavar="N", help="Batch size of the example.")
@click.option("--seq-len", type=click.IntRange(min=1), metavar="N", help="Sequence length of the example.")
def export_zoo(name: str, file: str, batch: int | None, seq_len: int | None) -> None:
    """Export NAME for inference to the ONNX FILE, with weights of random numbers and a free batch dimension."""
    from graphmem.sources.zoo_export import export_onnx

    check_output(file)
    export_onnx(name, file, batch, seq_len)
    click.echo(f"wrote {file}", err=True)


def _step_words(name: str) -> str:
    from graphmem.sources.zoo import usual_step

    return usual_step(name).describe().removeprefix("training, ")


def _survey_row(result: Any) -> tuple[Value, ...]:
    taken = (f"{result.seconds:.1f} s", result.ram_bytes)
    if result.peak is None:
        return (result.case.name, "failed", "", "", "", *taken)
    sizes = (getattr(result.peak, f"{level}_bytes") for level in LEVELS[1:])
    return (result.case.name, *sizes, str(result.unknown or "-"), *taken)
