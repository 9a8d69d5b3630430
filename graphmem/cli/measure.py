"""``graphmem measure``: cases run on the CUDA card of this machine, or ONNX files on its CPU, and what they take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphmem.cli.options import FORM_OPTION, measured_step_options
from graphmem.cli.output import publish
from graphmem.cli.progress import progress_bar
from graphmem.cli.step_options import step_of
from graphmem.errors import UsageError
from graphmem.estimate import LEVELS
from graphmem.reports import format_named
from graphmem.reports.document import Column, Document, Table, Value, section
from graphmem.training import Inference

if TYPE_CHECKING:
    from graphmem.accuracy.case import Case
    from graphmem.accuracy.record import Machine, Record


@click.command("measure", short_help="Run models on this machine's card and record peaks.")
@click.argument("models", nargs=-1)
@click.option("--zoo", is_flag=True, help="Every model of the zoo, in its usual training step and in inference.")
@measured_step_options
@click.option(
    "--runtime",
    type=click.Choice(["pytorch", "onnxruntime"]),
    default="pytorch",
    help="onnxruntime runs .onnx files on the CPU and reads its arena. Default pytorch.",
)
@click.option("--shapes", default="", metavar="RUNS", help="Runs of an ONNX session, e.g. 'batch=1;batch=16,seq=128'.")
@click.option(
    "--graphs", type=click.Path(file_okay=False, path_type=Path), help="Keep ONNX graphs without weights there."
)
@click.option(
    "--alloc-conf",
    default="",
    metavar="CONF",
    help="PYTORCH_CUDA_ALLOC_CONF of the process, or ONNX Runtime's options.",
)
@FORM_OPTION
@click.option("-o", "--output", default="measured.jsonl", metavar="FILE", help="Records. Default measured.jsonl.")
@click.option("--traces", type=click.Path(file_okay=False, path_type=Path), help="Keep allocation traces there.")
@click.option("--budget", type=click.FloatRange(min=1), metavar="SECONDS", help="Start no case after that.")
@click.option("--case-timeout", type=click.FloatRange(min=1), default=900.0, metavar="SECONDS", help="Default 900.")
@click.option("--cap", is_flag=True, help="Limit each case to its estimate and 1 %, to see whether it is enough.")
def measure_command(models: tuple[str, ...], zoo: bool, **options: Any) -> None:
    """Run MODELS on the GPU of this machine, each in a fresh process, and record what they take.

    MODELS are what 'graphmem analyze' takes: zoo:NAME, module.py:factory, hf:..., timm:... A case that the output file
    holds already is not run again, so an interrupted run goes on where it stopped. Running out of memory is a record.
    Unlike every other command this one executes the models. Without a CUDA GPU it exits with 1.

    With --runtime onnxruntime MODELS are .onnx files with their weights, run on the CPU without a GPU.
    """
    from graphmem.accuracy.measure import Plan, machine_here, measure

    cases = _cases(models, zoo, options)
    plan = Plan(
        output=Path(options["output"]),
        budget_seconds=options["budget"],
        case_seconds=options["case_timeout"],
        traces=options["traces"],
        graphs=options["graphs"],
    )
    if options["runtime"] == "pytorch":
        machine = machine_here(plan)
        if options["cap"]:
            plan = replace(plan, cap=lambda case: _cap_bytes(case, machine))
    records = []
    with progress_bar("measuring", len(cases)) as advance:
        for record in measure(cases, plan):
            records.append(record)
            advance(record.case.name)
    publish(_document(records), options["form"] or format_named("text"), None)
    click.echo(f"wrote {len(records)} records to {options['output']}", err=True)


def _cases(models: tuple[str, ...], zoo: bool, options: dict[str, Any]) -> list[Case]:
    from graphmem.accuracy.case import case_of, zoo_cases

    if not models and not zoo:
        raise UsageError("name the models to measure, or give --zoo")
    if options["runtime"] == "onnxruntime":
        return _onnx_cases(models, zoo, options)
    for option in ("shapes", "graphs"):
        if options[option]:
            raise UsageError(f"--{option} is for --runtime onnxruntime")
    cases = zoo_cases() if zoo else []
    for model in models:
        step = step_of(model, options)
        sizes = options["batch"], options["seq_len"]
        cases.append(case_of(model, step, *sizes, options["iterations"], options["alloc_conf"]))
    return cases


def _onnx_cases(models: tuple[str, ...], zoo: bool, options: dict[str, Any]) -> list[Case]:
    """Sessions of .onnx files; the provider is made part of the options, so that predictions are made for it."""
    from graphmem.accuracy.case import case_of
    from graphmem.accuracy.onnxruntime.child import options_of, runs_of

    if zoo or options["cap"] or options["traces"] or options["seq_len"]:
        raise UsageError("--zoo, --cap, --traces and --seq-len are not for --runtime onnxruntime; see --shapes")
    conf = ",".join(filter(None, ("provider:cpu", *options["alloc_conf"].replace("provider:cpu", "").split(","))))
    cases = []
    for model in models:
        if Path(model).suffix.lower() != ".onnx":
            raise UsageError(f"{model} is no .onnx file; 'graphmem zoo export' makes them of the zoo's models")
        step = step_of(model, options)
        if not isinstance(step, Inference):
            raise UsageError("ONNX Runtime measures inference; leave the options of training out")
        sizes = options["batch"], None, options["iterations"]
        case = case_of(model, step, *sizes, conf, "onnxruntime", options["shapes"])
        options_of(case), runs_of(case)  # mistakes are found before anything runs
        cases.append(case)
    return cases


def _cap_bytes(case: Case, machine: Machine) -> int | None:
    """The predicted reserved bytes and 1 %: the limit on what PyTorch may reserve."""
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
