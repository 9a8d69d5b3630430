"""The options that several commands share, as fields of the library's question, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import click

from graphmem.base.figures import parse_margin
from graphmem.base.options import Given, Whole, described, option
from graphmem.base.records import public_value
from graphmem.base.searching import AT_MOST
from graphmem.cli.fields import is_given, parameters, takes, values_of
from graphmem.cudnn.library import AUTO
from graphmem.devices import Device, custom_device, device_named, with_capability
from graphmem.errors import UsageError
from graphmem.graph.asked import Range
from graphmem.reports import FORMATS, Format, format_named, format_of_file
from graphmem.runtimes import built_in, runtime_named
from graphmem.sources.manifests import is_manifest, read_manifest
from graphmem.training import Inference, Training, weights_named
from graphmem.units import format_bytes, parse_size

#: Sections of the help.
INPUTS, STEP, CARD = "Sizes and inputs", "Step", "Card, runtime and allocator"

#: Values that a step of the zoo takes beside its own options.
_BESIDE_USUAL = {"data_dependent", "compile", "assume", "host_values_mb"}


# --- the card, the runtime and its allocator --------------------------------------------------------------------------


def device_of(gpu: str | None, gpu_memory: str | None) -> Device | None:
    """The card asked for, None when the user named none. Raises :class:`UsageError`."""
    if gpu_memory is None:
        return None if gpu is None else device_named(gpu)
    size = parse_size(gpu_memory)
    try:
        like = gpu and device_named(gpu)
    except UsageError as error:
        raise UsageError(
            f"{str(error).partition(';')[0]}; --gpu-memory {gpu_memory} is a card by itself, and --gpu-like NAME says "
            "which known one it is like otherwise (leave --gpu out)"
        ) from None
    return custom_device(size, like=like)


def _card(given: Given) -> Device | None:
    """The card asked for, with the other options about it. Raises :class:`UsageError`."""
    names = ("gpu", "gpu_memory", "gpu_like", "capability", "cuda", "already_used")
    gpu, memory, like, capability, cuda, used = (cast("str | None", given[name]) for name in names)
    if like and (gpu or not memory):
        raise UsageError("--gpu-like goes with --gpu-memory, and without --gpu")
    card = device_of(gpu or like, memory)
    if card is None:
        if named := [name for name in ("already_used", "cuda", "capability") if given[name]]:
            raise UsageError(f"--{named[0].replace('_', '-')} is said of a card: give --gpu or --gpu-memory too")
        return None
    if capability:
        card = with_capability(card, _version("--capability", capability))
    if cuda:
        card = replace(card, cuda_version=_version("--cuda", cuda))
    if used:
        others = parse_size(used)
        if others >= card.capacity_bytes:
            capacity = format_bytes(card.capacity_bytes)
            raise UsageError(f"--already-used {used} leaves nothing of the {capacity} of {card.name}")
        card = replace(card, others_bytes=others)
    return card


def _version(flag: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9]{1,2})(\.[0-9]+)*", text)
    if match is None:
        raise UsageError(f"{flag} {text} cannot be read; write two numbers, as 12.0")
    return int(match[1]), int(match[2])


def _runtime(given: Given) -> object:
    """The runtime, TensorFlow where it is given options. Raises :class:`UsageError`."""
    name = cast("str | None", given["runtime"])
    if not given["tf_option"]:
        return name
    if name is not None and runtime_named(name).name != "tensorflow":
        raise UsageError(f"--tf-option is for --runtime tensorflow, not {name}")
    return "tensorflow"


def _alloc_conf(given: Given) -> object:
    options = cast("tuple[str, ...]", given["tf_option"])
    return ",".join(filter(None, (given["alloc_conf"], *options))) if options else given["alloc_conf"]  # type: ignore[arg-type]


def _margin(text: str) -> str:
    parse_margin(text)  # before any work is done
    return text


@public_value(frozen=True)
class Target:
    """The card, the runtime and its allocator, as :func:`graphmem.replay_trace` names them."""

    device: Device | None = option(
        None,
        "The card; see 'graphmem gpus'.",
        flags="--gpu",
        metavar="NAME",
        make=_card,
        also=(
            described("Memory of the card instead of its own, e.g. 24GiB.", flags="--gpu-memory", metavar="SIZE"),
            described("What the card of --gpu-memory is like otherwise.", flags="--gpu-like", metavar="NAME"),
            described(
                "Compute capability of the card instead of its own, e.g. 7.5.", flags="--capability", metavar="X.Y"
            ),
            described("What others hold of the card, e.g. 884MiB.", flags="--already-used", metavar="SIZE"),
            described(
                "CUDA of the programs: before 11.7 all kernels are loaded at once. Default: 12 on.",
                flags="--cuda",
                metavar="X.Y",
            ),
        ),
        heading=CARD,
    )
    runtime: str | None = option(
        None, f"{', '.join(built_in())}, or a plug-in's. Default: the model's.", metavar="NAME", make=_runtime
    )
    alloc_conf: str | None = option(
        None,
        "PYTORCH_ALLOC_CONF, or the runtime's options as name:value,...",
        metavar="CONF",
        make=_alloc_conf,
        also=(
            described(
                "A GPU option or environment variable of TensorFlow, e.g. allow_growth=true, memory_limit=4096, "
                "TF_GPU_ALLOCATOR=cuda_malloc_async. Repeatable; implies --runtime tensorflow.",
                flags="--tf-option",
                repeated=True,
            ),
        ),
    )
    torch_version: str | None = option(
        None, "Version of PyTorch to predict. Default: the installed one.", metavar="X.Y"
    )
    margin: str | None = option(
        None,
        "How sure 'fits' must be: the share of runs, p50 to p100. Default: whatever is known to be possible fits.",
        metavar="p99",
        read=_margin,
    )


# --- the model and its step -------------------------------------------------------------------------------------------


def step_of(model: str, given: Given) -> Training | Inference:
    """The step the options describe. Raises :class:`UsageError` for a value or a combination that is not accepted."""
    training = given["training"]
    of_inference = parameters(Inference)
    chosen = [
        parameter.opts[0]
        for name, parameter in parameters(Training).items()
        if name not in of_inference and is_given(given.get(name))
    ]
    values = values_of(Inference, given)
    if model.startswith("zoo:") and not chosen and not values.keys() - _BESIDE_USUAL:
        from graphmem.sources.zoo import usual_step

        return replace(usual_step(model.removeprefix("zoo:"), training=training is not False), **values)  # type: ignore[arg-type]
    if is_manifest(model) and training is not False:
        step = read_manifest(model).step(cast("int | None", given.get("world_size")))
        return replace(step, **{key: value for key, value in values_of(Training, given).items() if key != "world_size"})  # type: ignore[arg-type]
    if training is None:
        is_inference = "weights" in values or "generate" in values or Path(model).suffix.lower() == ".onnx"
        training = bool(chosen) or not is_inference
    if not training:
        if chosen:
            raise UsageError(f"{chosen[0]} is an option of training; leave it or --inference out")
        return Inference(**values)  # type: ignore[arg-type]
    if "generate" in values:
        raise UsageError(f"--generate is inference; leave out {chosen[0] if chosen else '--training'}")
    if "weights" in values:
        raise UsageError(
            f"quantised weights are not trained: give --weights {weights_named(values['weights'])} with --inference; a "
            "program that trains adapters on them (QLoRA) is analysed by graphmem run"
        )
    return Training(**values_of(Training, given))  # type: ignore[arg-type]


_TRAINS = described("The step. Default: inference for .onnx, else training.", flags="--training/--inference")
_BATCH = described("Batch size (of a micro-batch).", Whole(), flags="-b --batch --batch-size")
_SEQ_LEN = described("Length of the sequences that the model takes.", Whole(), flags="-s --seq-len")
CUDNN = described(
    "Ask this cuDNN (9.8 or later; no GPU needed) for the workspaces of convolutions and recurrent networks. Default "
    "auto: the installed one, if there is one that can be asked; never: predict them.",
    metavar="auto|never|installed|PATH",
)
BOUNDS = described("Analyse what follows where such a line reads another value, too: how far figures may be off.")


def _dim(text: str) -> tuple[str, int | Range]:
    """``NAME=VALUE`` or ``NAME=SMALLEST..LARGEST``. Raises :class:`UsageError`."""
    name, _, value = text.rpartition("=")
    match = re.fullmatch(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?", value)
    if not name or match is None:
        raise UsageError(f"cannot read dimension {text!r}; write NAME=VALUE, for example batch=16")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise UsageError(f"the range {text!r} ends before it begins; write NAME={last}..{first}")
    return name, (first, last) if match[2] else first


def _input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """``NAME:1x3x224x224``, ``NAME:scalar`` for no dimensions. Raises :class:`UsageError`."""
    name, separator, shape = text.rpartition(":")
    if not separator or not name or not re.fullmatch(r"scalar|[0-9]{1,18}([x,][0-9]{1,18})*", shape):
        raise UsageError(f"cannot read input shape {text!r}; write NAME:1x3x224x224, or NAME:scalar")
    return name, () if shape == "scalar" else tuple(int(part) for part in re.split("[x,]", shape))


def _input_value(text: str) -> tuple[str, tuple[float, ...]]:
    """``NAME=VALUE,VALUE``, numbers, ``true`` or ``false``. Raises :class:`UsageError`."""
    name, _, listed = text.rpartition("=")
    try:
        if name:
            return name, tuple(map(_number, listed.split(",")))
    except ValueError:
        pass
    raise UsageError(f"cannot read input value {text!r}; write NAME=VALUE, for example sr=16000 or flag=true")


def _number(text: str) -> float:
    if text.lower() in ("true", "false"):
        return int(text.lower() == "true")
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else float(text)


@public_value(frozen=True)
class _Asked:
    """The step of a model, under the argument names of :func:`graphmem.analyze`."""

    batch: int | None = option(None, _BATCH, heading=INPUTS)
    seq_len: int | None = option(None, _SEQ_LEN)
    dims: Mapping[str, int | Range] | None = option(
        None,
        "Bind a symbolic dimension; to both ends of a range with NAME=640..1280. Repeatable.",
        flags="--dim",
        read=_dim,
        repeated=True,
    )
    input_shapes: Mapping[str, tuple[int, ...]] | None = option(
        None,
        "Shape of an input (NAME:scalar for none). Repeatable.",
        flags="--input-shape",
        metavar="NAME:1x3x224x224",
        read=_input_shape,
        repeated=True,
    )
    input_values: Mapping[str, tuple[float, ...]] | None = option(
        None,
        "Elements of a small input that branches and loops of an ONNX file depend on: sr=16000. Repeatable.",
        flags="--input-value",
        metavar="NAME=VALUE,...",
        read=_input_value,
        repeated=True,
    )
    trip_count: int | None = option(None, "Runs of a loop of an ONNX file, where data decides.", Whole())
    iterations: int | None = option(None, "Steps to simulate.", Whole())
    build_on: str = option("host", "Where the model is first created.", choices=("host", "device"))
    trust: bool = option(False, "Let PyTorch load a .pt2 file that holds more than data: it can run any program.")
    training: Training | Inference | None = option(
        None,
        "The step. Default: inference for .onnx, else training.",
        parts=(Training, Inference),
        make=lambda given: step_of(str(given["model"]), given),
        also=(_TRAINS,),
        heading=STEP,
    )
    bounds: bool = option(False, BOUNDS)
    cudnn: str = option(AUTO, CUDNN, heading=CARD)


@public_value(frozen=True)
class Request(Target, _Asked):
    """A question about a model, as :func:`graphmem.analyze` names it."""


@public_value(frozen=True)
class Measured:
    """The run of a model, without the options of files."""

    batch: int | None = option(None, _BATCH)
    seq_len: int | None = option(None, _SEQ_LEN)
    iterations: int = option(3, "Steps to run.", Whole())
    step: Callable[[str], Training | Inference] = option(
        cast("Callable[[str], Training | Inference]", None),
        "The step of each model.",
        parts=(Training, Inference),
        without=("generate",),
        make=lambda given: lambda model: step_of(model, given),
        also=(_TRAINS,),
    )


#: Which of several processes are analysed.
RANKS = described(
    "Analyse these processes, or all that differ, and report the fullest with the others' figures.",
    metavar="all|R,R,...",
    make=lambda given: _ranks(cast("str | None", given["ranks"]), given["rank"]),
)


def _ranks(text: str | None, rank: object) -> str | tuple[int, ...] | None:
    """The processes to analyse. Raises :class:`UsageError`."""
    if text is None or text == "all":
        return text
    if rank is not None:
        raise UsageError("--rank is one process and --ranks several; give one of them")
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise UsageError(f"--ranks {text} cannot be read; write all, or numbers: 0,3,7")
    return tuple(int(number) for number in text.split(","))


# --- what is shown, and where it goes ---------------------------------------------------------------------------------


def format_asked(name: object, file: object) -> Format:
    """The format of this name, else that of the file that is written, else text. An unknown name is a wrong option."""
    try:
        if name is not None:
            return format_named(str(name))
    except UsageError as error:
        raise click.BadParameter(str(error), click.get_current_context(), param_hint="--format") from None
    return (format_of_file(str(file)) if file else None) or format_named("text")


#: As which an answer is written.
FORMAT = described(
    f"{', '.join(FORMATS.own())}, or a plug-in's. Default: by the end of FILE's name, else text.",
    flags="--format",
    metavar="NAME",
    make=lambda given: format_asked(given["format"], given["output"]),
)
_FILE = described("Write there (whole or not at all) instead of to stdout.", flags="-o --output", metavar="FILE")


@public_value(frozen=True)
class Written:
    """In which format an answer is written, and where it goes: the same in every command that gives one."""

    form: Format = option(format_named("text"), FORMAT)
    output: str | None = option(None, _FILE)


@public_value(frozen=True)
class Output(Written):
    """The part of an estimate that is shown, its place, and when the command exits with 3."""

    details: bool = option(False, "Show the whole report: levels, phases, storages, assumptions, doubts.")
    tree: bool = option(False, "Show the modules too, each with its bytes at the peak.")
    top: int = option(25, "Largest storages of the peak that the whole report lists.", Whole(0))
    html: str | None = option(None, "Write the whole report as a page for a browser, too.", metavar="FILE")
    opens: bool = option(False, "Show that page in a browser (without --html: of a temporary file).", flags="--open")
    fail_on_oom: bool = option(False, "Exit with 3 when it does not fit the card.")
    budget_bytes: int | None = option(
        None,
        "Exit with 3 when it needs more device memory, e.g. 16GiB.",
        flags="--budget",
        metavar="SIZE",
        read=parse_size,
    )


@public_value(frozen=True)
class Limits:
    """What a search of the largest size looks at."""

    multiple_of: int = option(1, "Try only multiples of N.", Whole())
    spare_bytes: int | None = option(
        None,
        "Leave at least this much of the card, e.g. 1GiB. Default: anything.",
        flags="--spare",
        metavar="SIZE",
        read=parse_size,
    )
    at_most: int = option(AT_MOST, "Try nothing larger.", Whole())


#: Decorates a command: it has ``--format`` and ``-o``, and is given ``form`` and ``output``.
form_options = takes("", Written, "Output")


# --- places -----------------------------------------------------------------------------------------------------------


def existing(text: str) -> Path:
    """A file or folder that is there."""
    if not Path(text).exists():
        raise click.BadParameter(f"{text} does not exist", click.get_current_context())
    return Path(text)


def folder(text: str) -> Path:
    """A folder, which need not be there yet."""
    if Path(text).is_file():
        raise click.BadParameter(f"{text} is a file, and a folder is wanted", click.get_current_context())
    return Path(text)


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    return folder(str(existing(text)))
