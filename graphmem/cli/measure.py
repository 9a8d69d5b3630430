"""``graphmem measure``: cases run on the CUDA card of this machine, or ONNX files on its CPU, and their memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphmem.base.options import check_values, is_number, option
from graphmem.cli.fields import takes
from graphmem.cli.options import FORMAT, Measured, folder, format_asked
from graphmem.cli.output import publish
from graphmem.cli.progress import progress_bar
from graphmem.errors import UsageError
from graphmem.estimate import LEVELS
from graphmem.reports import Format, format_named
from graphmem.reports.document import Column, Document, Table, Value, section
from graphmem.training import Inference

if TYPE_CHECKING:
    from graphmem.accuracy.case import Case
    from graphmem.accuracy.record import Machine, Record


def _seconds(name: str, value: object) -> object:
    if not is_number(value) or value < 1:  # type: ignore[operator]
        raise click.BadParameter(f"{name} is a number of seconds of at least 1, not {value!r}")
    return value


@dataclass(frozen=True)
class Measurement:
    """The cases that are measured, their limits, and the kept results."""

    zoo: bool = option(False, "Every model of the zoo, in its usual training step and in inference.")
    runtime: str = option(
        "pytorch", "onnxruntime runs .onnx files on the CPU and reads its arena.", choices=("pytorch", "onnxruntime")
    )
    shapes: str = option("", "Runs of an ONNX session, e.g. 'batch=1;batch=16,seq=128'.", metavar="RUNS")
    graphs: Path | None = option(None, "Keep ONNX graphs without weights there.", metavar="DIRECTORY", read=folder)
    alloc_conf: str = option("", "PYTORCH_CUDA_ALLOC_CONF of the process, or ONNX Runtime's options.", metavar="CONF")
    form: Format = option(format_named("text"), FORMAT, make=lambda given: format_asked(given["format"], None))
    output: str = option("measured.jsonl", "Records.", flags="-o --output", metavar="FILE")
    traces: Path | None = option(None, "Keep allocation traces there.", metavar="DIRECTORY", read=folder)
    budget: float | None = option(None, "Start no case after that.", _seconds, metavar="SECONDS")
    case_timeout: float = option(900.0, "What a case may take.", _seconds, metavar="SECONDS")
    cap: bool = option(False, "Limit each case to its estimate and 1 %, to see whether it is enough.")

    def __post_init__(self) -> None:
        check_values(self)


@click.command("measure")
@click.argument("models", nargs=-1)
@takes("run", Measured)
@takes("asked", Measurement)
def measure_command(models: tuple[str, ...], run: Measured, asked: Measurement) -> None:
    """Run MODELS on the GPU of this machine, each in a fresh process, and record what they take.

    MODELS are what 'graphmem analyze' takes: zoo:NAME, module.py:factory, hf:..., timm:... A case that the output file
    holds already is not run again, so an interrupted run goes on where it stopped. Running out of memory is a record.
    Unlike every other command this one executes the models. Without a CUDA GPU it exits with 1.

    With --runtime onnxruntime MODELS are .onnx files with their weights, run on the CPU without a GPU.
    """
    from graphmem.accuracy.measure import Plan, machine_here, measure

    cases = _cases(models, run, asked)
    plan = Plan(
        output=Path(asked.output),
        budget_seconds=asked.budget,
        case_seconds=asked.case_timeout,
        traces=asked.traces,
        graphs=asked.graphs,
    )
    if asked.runtime == "pytorch":
        machine = machine_here(plan)
        if asked.cap:
            plan = replace(plan, cap=lambda case: _cap_bytes(case, machine))
    records = []
    with progress_bar("measuring", len(cases)) as advance:
        for record in measure(cases, plan):
            records.append(record)
            advance(record.case.name)
    publish(_document(records), asked.form, None)
    click.echo(f"wrote {len(records)} records to {asked.output}", err=True)


def _cases(models: tuple[str, ...], run: Measured, asked: Measurement) -> list[Case]:
    from graphmem.accuracy.case import case_of, zoo_cases

    if not models and not asked.zoo:
        raise UsageError("name the models to measure, or give --zoo")
    if asked.runtime == "onnxruntime":
        return _onnx_cases(models, run, asked)
    for name in ("shapes", "graphs"):
        if getattr(asked, name):
            raise UsageError(f"--{name} is for --runtime onnxruntime")
    cases = zoo_cases() if asked.zoo else []
    for model in models:
        cases.append(case_of(model, run.step(model), run.batch, run.seq_len, run.iterations, asked.alloc_conf))
    return cases


def _onnx_cases(models: tuple[str, ...], run: Measured, asked: Measurement) -> list[Case]:
    """Sessions of .onnx files; the provider is made part of the options, so that predictions are made for it."""
    from graphmem.accuracy.case import case_of
    from graphmem.accuracy.onnxruntime.child import options_of, runs_of

    if asked.zoo or asked.cap or asked.traces or run.seq_len:
        raise UsageError("--zoo, --cap, --traces and --seq-len are not for --runtime onnxruntime; see --shapes")
    conf = ",".join(filter(None, ("provider:cpu", *asked.alloc_conf.replace("provider:cpu", "").split(","))))
    cases = []
    for model in models:
        if Path(model).suffix.lower() != ".onnx":
            raise UsageError(f"{model} is no .onnx file; 'graphmem zoo export' makes them of the zoo's models")
        step = run.step(model)
        if not isinstance(step, Inference):
            raise UsageError("ONNX Runtime measures inference; leave the options of training out")
        case = case_of(model, step, run.batch, None, run.iterations, conf, "onnxruntime", asked.shapes)
        options_of(case), runs_of(case)  # mistakes are found before anything runs
        cases.append(case)
    return cases


def _cap_bytes(case: Case, machine: Machine) -> int | None:
    """The predicted reserved bytes and 1 %: the limit on PyTorch's reserved memory."""
    from graphmem.accuracy.compare import CAP_SLACK, predict

    peak = predict(case, machine).peak
    return None if peak is None else int((1 + CAP_SLACK) * peak.reserved_bytes)


def _document(records: list[Record]) -> Document:
    levels = (Column(level, "bytes") for level in LEVELS[1:])
    words = (Column(title, wraps=False) for title in ("case", "status"))
    columns = (*words, *levels, Column("retries", "count"), Column("time", "figure"))
    data = {"schema": "graphmem.measured/1", "records": [json.loads(record.to_line()) for record in records]}
    return Document("measured", "Peaks", (section("", Table(columns, list(map(_row, records)))),), lambda: data)


def _row(record: Record) -> tuple[Value, ...]:
    seconds = f"{record.seconds:.0f} s"
    if record.measured is None:
        return (record.case.name, f"{record.status}: {record.error[:60]}", "", "", "", "", seconds)
    measured = record.measured
    device = measured.device.peak_bytes if measured.device is not None else "-"
    sizes = (measured.allocated_bytes, measured.reserved_bytes, device)
    return (record.case.name, record.status, *sizes, measured.retries, seconds)
