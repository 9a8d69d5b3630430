"""``graphmem verify``: one model predicted and measured on this machine's card, and where the two part."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from graphmem.cli.options import form_of, form_options, measured_step_options
from graphmem.cli.output import check_output, publish, working
from graphmem.cli.step_options import step_of
from graphmem.estimate import LEVELS
from graphmem.reports.document import Column, Document, Table, Text, Value, section

SCHEMA = "graphmem.verification/1"


@click.command("verify", short_help="Predict, run on this machine's card, and compare.")
@click.argument("model")
@measured_step_options
@click.option("--alloc-conf", default="", metavar="CONF", help="PYTORCH_CUDA_ALLOC_CONF of both.")
@click.option(
    "-n", "--number", type=click.IntRange(min=0), default=5, metavar="N", help="Differences to show. Default 5."
)
@form_options
def verify_command(model: str, number: int, **options: Any) -> None:
    """Predict MODEL, run it on the GPU of this machine, and compare the two, allocation by allocation.

    Like 'graphmem measure' this executes the model. Without a CUDA GPU it exits with 1.
    """
    from graphmem.accuracy.case import case_of
    from graphmem.accuracy.compare import Comparison, predict
    from graphmem.accuracy.divergence import describe_divergence, measured_changes
    from graphmem.accuracy.measure import Plan, machine_here, measure_one
    from graphmem.errors import SourceError

    check_output(options["output"])
    step = step_of(model, options)
    case = case_of(model, step, options["batch"], options["seq_len"], options["iterations"], options["alloc_conf"])
    with tempfile.TemporaryDirectory() as folder, working() as progress:
        plan = Plan(traces=Path(folder))
        progress("looking for a GPU")
        machine = machine_here(plan)
        progress("predicting")
        predicted = predict(case, machine, keep_trace=True)
        if predicted.error:
            raise SourceError(predicted.error)
        progress("measuring")
        record = measure_one(case, plan)
        if record.measured is None:
            raise SourceError(f"measuring failed: {record.error}")
        measured = measured_changes(Path(folder) / record.trace)
    comparison = Comparison(record, predicted)
    assert predicted.trace is not None
    columns = (Column("level"), Column("predicted", "bytes"), Column("measured", "bytes"), Column("error", "figure"))
    sections = (
        section("", Text([f"{case.name} on {machine.gpu}: {record.status}"])),
        section("", Table(columns, [_row(comparison, at) for at in LEVELS])),
        section("", Text(tuple(describe_divergence(predicted.trace, measured, number)))),
    )
    data = {
        "schema": SCHEMA,
        "case": case.to_json(),
        "gpu": machine.gpu,
        "status": record.status,
        "levels": {
            at: {"predicted_bytes": comparison.predicted_bytes(at), "measured_bytes": comparison.measured_bytes(at)}
            for at in LEVELS
        },
    }
    document = Document("verification", f"{case.name} on {machine.gpu}", sections, lambda: data)
    publish(document, form_of(options), options["output"])


def _row(comparison: Any, level: str) -> tuple[Value, ...]:
    sizes = comparison.predicted_bytes(level), comparison.measured_bytes(level)
    return (level, *sizes, f"{comparison.error(level):+.3%}")
