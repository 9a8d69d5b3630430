"""Options that several commands share, and their translation into the values of the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from graphmem.base.figures import parse_margin
from graphmem.cli.groups import grouped
from graphmem.cli.step_options import GENERATION_OPTIONS, POSITIVE, STEP_OPTIONS, step_of
from graphmem.cudnn.library import AUTO
from graphmem.devices import Device, custom_device, device_named, with_capability
from graphmem.errors import UsageError
from graphmem.graph.asked import Range
from graphmem.reports import FORMATS, Format, format_named, format_of_file
from graphmem.runtimes import built_in, runtime_named
from graphmem.units import MIB, format_bytes, parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])

#: Which of several processes are analysed.
RANKS_OPTION = click.option(
    "--ranks",
    metavar="all|R,R,...",
    help="Analyse these processes, or all that differ, and report the fullest with the others' figures.",
)


def _format(ctx: click.Context, param: click.Parameter, value: str | None) -> Format | None:
    """The format of this name; one that there is not is a wrong option."""
    try:
        return None if value is None else format_named(value)
    except UsageError as error:
        raise click.BadParameter(str(error), ctx, param) from None


FORM_OPTION = click.option(
    "--format",
    "form",
    callback=_format,
    metavar="NAME",
    help=f"{', '.join(FORMATS.own())}, or a plug-in's. Default: by the end of FILE's name, else text.",
)
#: In which format an answer is written, and where it goes: the same in every command that gives one.
FORM_OPTIONS = (
    FORM_OPTION,
    click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout."),
)

_SIZE_OPTIONS = (
    click.option(
        "-b", "--batch", "--batch-size", "batch", type=POSITIVE, metavar="N", help="Batch size (of a micro-batch)."
    ),
    click.option("-s", "--seq-len", type=POSITIVE, metavar="N", help="Length of the sequences that the model takes."),
)

_INPUT_OPTIONS = (
    *_SIZE_OPTIONS,
    click.option(
        "--dim",
        multiple=True,
        metavar="NAME=VALUE",
        help="Bind a symbolic dimension; to both ends of a range with NAME=640..1280. Repeatable.",
    ),
    click.option(
        "--input-shape",
        multiple=True,
        metavar="NAME:1x3x224x224",
        help="Shape of an input (NAME:scalar for none). Repeatable.",
    ),
    click.option(
        "--input-value",
        multiple=True,
        metavar="NAME=VALUE,...",
        help="Elements of a small input that branches and loops of an ONNX file depend on: sr=16000. Repeatable.",
    ),
    click.option(
        "--trip-count", type=POSITIVE, metavar="N", help="Runs of a loop of an ONNX file, where data decides."
    ),
    click.option("--iterations", type=POSITIVE, metavar="N", help="Steps to simulate."),
    click.option(
        "--build-on", type=click.Choice(["host", "device"]), default="host", help="Where the model is first created."
    ),
    click.option(
        "--trust", is_flag=True, help="Let PyTorch load a .pt2 file that holds more than data: it can run any program."
    ),
)

_MEASURED_OPTIONS = (
    *_SIZE_OPTIONS,
    click.option("--iterations", type=POSITIVE, default=3, metavar="N", help="Steps to run. Default 3."),
)

_TARGET_OPTIONS = (
    click.option("--gpu", metavar="NAME", help="The card; see 'graphmem gpus'."),
    click.option("--gpu-memory", metavar="SIZE", help="Memory of the card instead of its own, e.g. 24GiB."),
    click.option("--gpu-like", metavar="NAME", help="What the card of --gpu-memory is like otherwise."),
    click.option("--capability", metavar="X.Y", help="Compute capability of the card instead of its own, e.g. 7.5."),
    click.option("--already-used", metavar="SIZE", help="What others hold of the card, e.g. 884MiB."),
    click.option(
        "--cuda",
        metavar="X.Y",
        help="CUDA of the programs: before 11.7 all kernels are loaded at once. Default: 12 on.",
    ),
    click.option("--runtime", metavar="NAME", help=f"{', '.join(built_in())}, or a plug-in's. Default: the model's."),
    click.option("--alloc-conf", metavar="CONF", help="PYTORCH_ALLOC_CONF, or the runtime's options as name:value,..."),
    click.option(
        "--tf-option",
        multiple=True,
        metavar="NAME=VALUE",
        help="A GPU option or environment variable of TensorFlow, e.g. allow_growth=true, memory_limit=4096, "
        "TF_GPU_ALLOCATOR=cuda_malloc_async. Repeatable; implies --runtime tensorflow.",
    ),
    click.option("--torch-version", metavar="X.Y", help="Version of PyTorch to predict. Default: the installed one."),
    click.option(
        "--margin",
        metavar="p99",
        help="How sure 'fits' must be: the share of runs, p50 to p100. Default: whatever is known to be possible fits.",
    ),
)

_CUDNN_OPTIONS = (
    click.option(
        "--cudnn",
        metavar="auto|never|installed|PATH",
        default=AUTO,
        help="Ask this cuDNN (9.8 or later; no GPU needed) for the workspaces of convolutions and recurrent networks. "
        "Default auto: the installed one, if there is one that can be asked; never: predict them.",
    ),
)

_OUTPUT_OPTIONS = (
    click.option("--top", type=click.IntRange(min=0), default=5, metavar="N", help="Storages to list. Default 5."),
    click.option("--details", is_flag=True, help="Show all phases, storages and further details."),
    *FORM_OPTIONS,
    click.option("--fail-on-oom", is_flag=True, help="Exit with 3 when it does not fit the card."),
    click.option("--budget", metavar="SIZE", help="Exit with 3 when it needs more device memory, e.g. 16GiB."),
)


def model_options(command: Command) -> Command:
    """MODEL and everything that says what its step is."""
    decorated = grouped("Generation (transformers)", GENERATION_OPTIONS)(cudnn_options(command))
    decorated = grouped("Sizes and inputs", _INPUT_OPTIONS)(grouped("Step", STEP_OPTIONS)(decorated))
    return click.argument("model")(decorated)


def cudnn_options(command: Command) -> Command:
    """Whether a cuDNN is asked."""
    return grouped("Card, runtime and allocator", _CUDNN_OPTIONS)(command)


def measured_step_options(command: Command) -> Command:
    """What says how a model is run, without what says how a file is read."""
    decorated = command
    for option in reversed((*_MEASURED_OPTIONS, *STEP_OPTIONS)):
        decorated = option(decorated)
    return decorated


def form_options(command: Command) -> Command:
    """In which format an answer is written, and where it goes."""
    return grouped("Output", FORM_OPTIONS)(command)


def target_options(command: Command) -> Command:
    """The card, the runtime and its allocator."""
    return grouped("Card, runtime and allocator", _TARGET_OPTIONS)(command)


def output_options(command: Command) -> Command:
    """What is shown and where it goes."""
    return grouped("Output", _OUTPUT_OPTIONS)(command)


@dataclass(frozen=True, slots=True)
class Output:
    """The values of the output options."""

    top: int
    details: bool
    form: Format
    output: str | None
    fail_on_oom: bool
    budget_bytes: int | None = None


def device_of(gpu: str | None, gpu_memory: str | None) -> Device | None:
    """The card asked for, None when the user named none. Raises :class:`UsageError`."""
    if gpu_memory is None:
        return None if gpu is None else device_named(gpu)
    capacity = parse_bytes(gpu_memory)
    if 0 < capacity < MIB:
        raise UsageError(f"--gpu-memory {gpu_memory} is {capacity} bytes, which no card has; write a unit: 24GiB")
    return custom_device(capacity, like=gpu)


def _target_card(options: Mapping[str, Any]) -> Device | None:
    """The card asked for, with what else was said of it. Raises :class:`UsageError`."""
    like = options["gpu_like"]
    if like and (options["gpu"] or not options["gpu_memory"]):
        raise UsageError("--gpu-like goes with --gpu-memory, and without --gpu")
    card = device_of(options["gpu"] or like, options["gpu_memory"])
    used, cuda, capability = options["already_used"], options["cuda"], options["capability"]
    if card is None:
        said = [f"--{name.replace('_', '-')}" for name in ("already_used", "cuda", "capability") if options[name]]
        if said:
            raise UsageError(f"{said[0]} is said of a card: give --gpu or --gpu-memory too")
        return None
    if capability:
        card = with_capability(card, _version("--capability", capability))
    if cuda:
        card = replace(card, cuda_version=_version("--cuda", cuda))
    if used:
        others = parse_bytes(used)
        if others >= card.capacity_bytes:
            capacity = format_bytes(card.capacity_bytes)
            raise UsageError(f"--already-used {used} leaves nothing of the {capacity} of {card.name}")
        card = replace(card, others_bytes=others)
    return card


def _version(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,2})(\.[0-9]+)*", text)
    if match is None:
        raise UsageError(f"{option} {text} cannot be read; write two numbers, as 12.0")
    return int(match[1]), int(match[2])


def dims_of(texts: tuple[str, ...]) -> dict[str, int | Range]:
    """Read ``NAME=VALUE`` and ``NAME=SMALLEST..LARGEST``. Raises :class:`UsageError`."""
    dims: dict[str, int | Range] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        match = re.fullmatch(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?", value)
        if not name or match is None:
            raise UsageError(f"cannot read dimension {text!r}; write NAME=VALUE, for example batch=16")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"the range {text!r} ends before it begins; write NAME={last}..{first}")
        dims[name] = (first, last) if match[2] else first
    return dims


def values_of(texts: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """Read ``NAME=VALUE,VALUE``, numbers, ``true`` or ``false``. Raises :class:`UsageError`."""
    values: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, _, listed = text.rpartition("=")
        try:
            values[name] = tuple(
                _BOOLEANS[v.lower()] if v.lower() in _BOOLEANS else _number(v) for v in listed.split(",")
            )
        except ValueError:
            name = ""
        if not name:
            raise UsageError(f"cannot read input value {text!r}; write NAME=VALUE, for example sr=16000 or flag=true")
    return values


_BOOLEANS = {"true": 1, "false": 0}


def _number(text: str) -> float:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else float(text)


def shapes_of(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Read ``NAME:1x3x224x224`` (``NAME:scalar`` for no dimensions). Raises :class:`UsageError`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, separator, shape = text.rpartition(":")
        if not separator or not name or not re.fullmatch(r"scalar|[0-9]{1,18}([x,][0-9]{1,18})*", shape):
            raise UsageError(f"cannot read input shape {text!r}; write NAME:1x3x224x224, or NAME:scalar")
        shapes[name] = () if shape == "scalar" else tuple(int(part) for part in re.split("[x,]", shape))
    return shapes


def request_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``graphmem.analyze.analyze`` that the model and target options ask for."""
    return {
        "batch": options["batch"],
        "seq_len": options["seq_len"],
        "training": step_of(options["model"], options),
        "dims": dims_of(options["dim"]) or None,
        "input_shapes": shapes_of(options["input_shape"]) or None,
        "input_values": values_of(options["input_value"]) or None,
        "trip_count": options["trip_count"],
        "iterations": options["iterations"],
        "build_on": options["build_on"],
        "cudnn": options["cudnn"],
        "trust": options["trust"],
        "bounds": options["bounds"],
        **target_of(options),
    }


def target_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that the target options ask for. Raises :class:`UsageError`."""
    runtime, alloc_conf = options["runtime"], options["alloc_conf"]
    if options["margin"] is not None:
        parse_margin(options["margin"])  # before any work is done
    if options["tf_option"]:
        if runtime is not None and runtime_named(runtime).name != "tensorflow":
            raise UsageError(f"--tf-option is for --runtime tensorflow, not {runtime}")
        runtime = "tensorflow"
        alloc_conf = ",".join(filter(None, (alloc_conf, *options["tf_option"])))
    return {
        "runtime": runtime,
        "device": _target_card(options),
        "alloc_conf": alloc_conf,
        "torch_version": options["torch_version"],
        "margin": options["margin"],
    }


def ranks_of(options: Mapping[str, Any]) -> str | tuple[int, ...] | None:
    """The processes to analyse. Raises :class:`UsageError`."""
    text = options["ranks"]
    if text is None or text == "all":
        return text  # type: ignore[no-any-return]
    if options["rank"] is not None:
        raise UsageError("--rank is one process and --ranks several; give one of them")
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise UsageError(f"--ranks {text} cannot be read; write all, or numbers: 0,3,7")
    return tuple(int(number) for number in text.split(","))


def output_of(options: Mapping[str, Any]) -> Output:
    """The values of the output options. Raises :class:`UsageError`."""
    names = ("top", "details", "output", "fail_on_oom")
    budget = None if options["budget"] is None else parse_bytes(options["budget"])
    return Output(**{name: options[name] for name in names}, form=form_of(options), budget_bytes=budget)


def form_of(options: Mapping[str, Any]) -> Format:
    """The format that was asked for, else that of the file that is written, else text."""
    found: Format | None = options["form"]
    return found or (format_of_file(options["output"]) if options["output"] else None) or format_named("text")
