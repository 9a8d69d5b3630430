"""``graphmem verify``: one model predicted and measured on this machine's card, and where the two part."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphmem.base.options import Whole, option
from graphmem.cli.completion import models
from graphmem.cli.fields import takes
from graphmem.cli.options import Measured, form_options
from graphmem.cli.output import check_output, publish, working
from graphmem.estimate import LEVELS
from graphmem.reports import Format
from graphmem.reports.document import Column, Document, Table, Text, Value, section

if TYPE_CHECKING:
    from graphmem.accuracy.compare import Comparison

SCHEMA = "graphmem.verification/1"


@dataclass(frozen=True)
class Verified:
    """Beside the step."""

    alloc_conf: str = option("", "PYTORCH_CUDA_ALLOC_CONF of both.", metavar="CONF")
    number: int = option(5, "Differences to show.", Whole(0), flags="-n --number")


@click.command("verify")
@click.argument("model", shell_complete=models)
@takes("run", Measured)
@takes("", Verified)
@form_options
def verify_command(model: str, run: Measured, alloc_conf: str, number: int, form: Format, output: str | None) -> None:
    """Predict MODEL, run it on the GPU of this machine, and compare the two, allocation by allocation.

    Like 'graphmem measure' this executes the model. Without a CUDA GPU it exits with 1.
    """
    from graphmem.accuracy.case import case_of
    from graphmem.accuracy.compare import Comparison, predict
    from graphmem.accuracy.divergence import describe_divergence, measured_changes
    from graphmem.accuracy.measure import Plan, machine_here, measure_one
    from graphmem.errors import SourceError

    check_output(output)
    case = case_of(model, run.step(model), run.batch, run.seq_len, run.iterations, alloc_conf)
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
    publish(document, form, output)


def _row(comparison: Comparison, level: str) -> tuple[Value, ...]:
    sizes = comparison.predicted_bytes(level), comparison.measured_bytes(level)
    return (level, *sizes, f"{comparison.error(level):+.3%}")
