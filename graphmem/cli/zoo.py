"""``graphmem zoo``: the models that come with graphmem, listed, analysed all at once, or exported to ONNX."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import click

from graphmem.base.options import Whole, option
from graphmem.cli.fields import takes
from graphmem.cli.options import form_options
from graphmem.cli.output import check_output, publish
from graphmem.cli.progress import progress_bar
from graphmem.estimate import LEVELS
from graphmem.reports import Format
from graphmem.reports.document import Column, Document, Table, Text, Value, section
from graphmem.workers import Workers

SCHEMA = "graphmem.zoo/1"
_STEPS = {"training": ("training",), "inference": ("inference",), "both": ("training", "inference")}


@dataclass(frozen=True)
class Listed:
    """Which models are listed."""

    family: str | None = option(None, "Only this family, e.g. Llama.", metavar="NAME")


@dataclass(frozen=True)
class Survey:
    """The options of the models' analyses."""

    step: str = option("both", "Which step of each.", choices=tuple(_STEPS))
    gpu: str | None = option(None, "The card; see 'graphmem gpus'.", metavar="NAME")


@dataclass(frozen=True)
class Example:
    """The sizes of the example that is exported."""

    batch: int | None = option(None, "Batch size of the example.", Whole(), flags="-b --batch")
    seq_len: int | None = option(None, "Sequence length of the example.", Whole())


@click.group("zoo", invoke_without_command=True)
@takes("", Listed)
@form_options
@click.pass_context
def zoo_command(context: click.Context, /, family: str | None, form: Format, output: str | None) -> None:
    """List the models of the zoo; 'graphmem analyze zoo:NAME' and 'graphmem measure zoo:NAME' take any of them."""
    if context.invoked_subcommand is not None:
        return
    from graphmem.sources.zoo import zoo_entries

    check_output(output)
    entries = [entry for entry in zoo_entries() if family is None or entry.family.lower() == family.lower()]
    columns = (
        *(Column(title, wraps=False) for title in ("name", "family", "library")),
        Column("batch", "count"), Column("tokens", "figure"), Column("usual step", wraps=False),
    )  # fmt: skip
    rows = [(e.name, e.family, e.library, e.batch, str(e.length or "-"), _step_words(e.name)) for e in entries]
    sections = (section("", Table(columns, rows)), section("", Text([f"{len(entries)} models."])))
    data = {"schema": SCHEMA, "models": [asdict(entry) for entry in entries]}
    publish(Document("zoo", "The zoo", sections, lambda: data), form, output)


@zoo_command.command("analyze")
@click.argument("names", nargs=-1)
@takes("survey", Survey)
@takes("workers", Workers)
@form_options
def analyze_zoo(names: tuple[str, ...], survey: Survey, workers: Workers, form: Format, output: str | None) -> None:
    """Analyse NAMES, or the whole zoo, each model with its usual batch and step; exit with 1 if one fails."""
    from graphmem.accuracy.case import zoo_cases
    from graphmem.accuracy.survey import survey as results_of

    check_output(output)
    cases = zoo_cases(names, _STEPS[survey.step])
    results = []
    with progress_bar("analysing", len(cases)) as advance:
        for result in results_of(cases, survey.gpu, workers.on_all_cores()):
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
    publish(Document("zoo", "Analyses of the zoo", sections, lambda: data), form, output)
    failed = [result for result in results if result.error]
    for result in failed:
        click.echo(f"graphmem: {result.case.name}: {result.error}", err=True)
    if failed:
        click.get_current_context().exit(1)


@zoo_command.command("export")
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False))
@takes("", Example)
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
