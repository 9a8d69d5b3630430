"""Options that several commands share, and their translation into the values of the library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from graphmem.cli.groups import grouped
from graphmem.cudnn.library import AUTO
from graphmem.devices import Device, custom_device, device_named, with_capability
from graphmem.documents import read_json
from graphmem.errors import UsageError
from graphmem.figures import parse_margin
from graphmem.runtimes import built_in, runtime_named
from graphmem.training import (
    AMP_DTYPES,
    ATTENTION_MASKS,
    CACHE_IMPLEMENTATIONS,
    COMPILE_MODES,
    DTYPES,
    LOOPS,
    MOST_HOST_MIB,
    OPTIMIZERS,
    SCHEDULERS,
    SHARDS,
    WEIGHTS,
    ZERO_GRAD_AT,
    DataParallel,
    FullyShard,
    Generation,
    Inference,
    PipelineParallel,
    Training,
    ZeRO,
    parse_assumption,
    parse_lengths,
    parse_optimizer_arg,
    weights_named,
)
from graphmem.training.parts import checked_plan
from graphmem.training.pipelines import SCHEDULES as SCHEDULES_OF_PIPELINES
from graphmem.units import MIB, format_bytes, parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])
POSITIVE = click.IntRange(min=1)

#: Options that make no sense for inference: parameter name -> how it is written.
_TRAINING_ONLY = {
    "optimizer": "--optimizer",
    "optimizer_arg": "--optimizer-arg",
    "checkpoint_activations": "--checkpoint-activations",
    "grad_accum": "--grad-accum",
    "clip_grad_norm": "--clip-grad-norm",
    "zero_grad": "--zero-grad",
    "zero_grad_at": "--zero-grad-at",
    "loop": "--loop",
    "grad_scaler": "--grad-scaler",
    "lr_scheduler": "--lr-scheduler",
    "seq_lens": "--seq-lens",
    "last_batch": "--last-batch",
    "eval_batches": "--eval-batches",
    "eval_batch_size": "--eval-batch-size",
    "steps_per_epoch": "--steps-per-epoch",
    "ddp": "--ddp",
    "world_size": "--world-size",
    "ddp_option": "--ddp-option",
    "rank": "--rank",
    "nproc_per_node": "--nproc-per-node",
    "fsdp": "--fsdp",
    "fsdp_shard": "--fsdp-shard",
    "fsdp_offload": "--fsdp-offload",
    "fsdp_sync_each_batch": "--fsdp-sync-each-batch",
    "zero": "--zero",
    "zero_config": "--zero-config",
    "sp": "--sp",
    "tp_plan": "--tp-plan",
    "cp": "--cp",
    "pp": "--pp",
    "schedule": "--schedule",
    "micro_batches": "--micro-batches",
    "pp_layers": "--pp-layers",
}

#: Which of several processes is analysed.
RANK_OPTION = click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Which of the processes is analysed. Default 0."
)
RANKS_OPTION = click.option(
    "--ranks",
    metavar="all|R,R,...",
    help="Analyse these processes, or all that differ, and report the fullest with the others' figures.",
)

#: What is said of values that are data.
VALUE_OPTIONS = (
    click.option(
        "--data-dependent",
        type=float,
        metavar="SHARE",
        help="How much nonzero, boolean masks and unique select where it is not known, e.g. 0.25. Default: all.",
    ),
    click.option(
        "--assume",
        multiple=True,
        metavar="FILE.py:LINE=VALUE",
        help="What a line reads of unknown data: a number, true, false, or how many it selects. Repeatable.",
    ),
    click.option(
        "--host-values",
        type=click.IntRange(0, MOST_HOST_MIB),
        metavar="MIB",
        help="Host tensors up to this size hold real data, eight times as much together. Default 64.",
    ),
)

_STEP_OPTIONS = (
    click.option("--training/--inference", default=None, help="The step. Default: inference for .onnx, else training."),
    click.option(
        "--optimizer",
        metavar="NAME",
        help=f"Default adamw. One of: {', '.join(OPTIMIZERS)}; or module:Class of your own.",
    ),
    click.option(
        "--optimizer-arg",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the optimizer, e.g. momentum=0.9, foreach=false, betas=0.9,0.95. Repeatable.",
    ),
    click.option("--dtype", metavar="TYPE", help=f"Precision of weights: {', '.join(DTYPES)}. Default fp32."),
    click.option(
        "--weights",
        metavar="TYPE",
        help=f"Quantised weights of linear layers (hf: models, inference): {', '.join(WEIGHTS)}.",
    ),
    click.option("--amp", metavar="TYPE", help=f"Autocast: {', '.join(AMP_DTYPES)} or off. Default off."),
    click.option("--compile", "compile_", is_flag=True, help="Compile the model with torch.compile."),
    click.option("--compile-mode", metavar="MODE", help=f"Its mode: {', '.join(COMPILE_MODES)}. Implies --compile."),
    click.option("--checkpoint-activations", is_flag=True, help="Recompute activations in the backward pass."),
    click.option(
        "--grad-accum",
        "--gradient-accumulation-steps",
        "grad_accum",
        type=POSITIVE,
        metavar="N",
        help="Micro-batches per optimizer step. Default 1.",
    ),
    click.option(
        "--clip-grad-norm",
        "--max-grad-norm",
        "clip_grad_norm",
        type=float,
        metavar="NORM",
        help="Clip the gradients to this norm.",
    ),
    click.option(
        "--loop",
        metavar="HOW",
        help=f"{' or '.join(LOOPS)}: whether a variable holds the model's output until the next one takes its place, "
        "as in loops written by hand. Default hold; transformers' Trainer drops it.",
    ),
    click.option(
        "--grad-scaler/--no-grad-scaler", default=None, help="Scale the loss (GradScaler). Default: with --amp fp16."
    ),
    click.option(
        "--lr-scheduler",
        metavar="NAME",
        help=f"{', '.join(SCHEDULERS)}, or a name of transformers' (linear, cosine, ...). Default none.",
    ),
    click.option("--ddp", is_flag=True, help="Data-parallel training (DistributedDataParallel); needs --world-size."),
    click.option("--world-size", type=POSITIVE, metavar="N", help="Processes, one card each; the analysis is of one."),
    RANK_OPTION,
    click.option(
        "--nproc-per-node",
        "--nproc_per_node",
        type=POSITIVE,
        metavar="N",
        help="Processes, and cards, of a machine. Default: 8 where more processes fill machines of 8, else all.",
    ),
    click.option(
        "--ddp-option",
        multiple=True,
        metavar="NAME=VALUE",
        help="bucket_cap_mb, gradient_as_bucket_view, static_graph, find_unused_parameters or broadcast_buffers.",
    ),
    click.option(
        "--fsdp",
        type=click.IntRange(min=0),
        is_flag=False,
        flag_value=0,
        metavar="[N]",
        help="Sharded training (FSDP2, fully_shard of every block) over N processes, or over --world-size.",
    ),
    click.option("--fsdp-shard", metavar="WHAT", help=f"{', '.join(SHARDS)} (N replicas of M shards). Default full."),
    click.option("--fsdp-offload", is_flag=True, help="Keep parameters and optimizer states in pinned host memory."),
    click.option(
        "--fsdp-sync-each-batch",
        is_flag=True,
        help="Reduce gradients after every micro-batch (accelerate's sync_each_batch). Default: after the last.",
    ),
    click.option(
        "--zero",
        type=click.IntRange(0, 3),
        metavar="STAGE",
        help="Train in a DeepSpeed engine with ZeRO's stage 0, 1, 2 or 3; needs --world-size and DeepSpeed.",
    ),
    click.option(
        "--tp",
        type=POSITIVE,
        metavar="N",
        help="Processes that share each layer, by the model's own plan (transformers).",
    ),
    click.option("--ep", type=POSITIVE, metavar="N", help="Processes that share the experts, likewise."),
    click.option(
        "--sp", is_flag=True, help="Share activations between layers too (PyTorch's SequenceParallel), with --tp."
    ),
    click.option(
        "--tp-plan",
        metavar="FILE",
        help="Rules for --tp beside the model's own: JSON, modules' names to styles' names.",
    ),
    click.option("--cp", type=POSITIVE, metavar="N", help="Processes that share each sequence, of those of --fsdp."),
    click.option(
        "--pp", type=POSITIVE, metavar="N", help="Processes of a pipeline of the model's layers (transformers)."
    ),
    click.option(
        "--schedule", metavar="NAME", help=f"PyTorch's schedule of the pipeline: {', '.join(SCHEDULES_OF_PIPELINES)}."
    ),
    click.option(
        "--micro-batches",
        type=POSITIVE,
        metavar="M",
        help="Into how many the pipeline cuts the batch (-b). Default: one a row.",
    ),
    click.option(
        "--pp-layers", metavar="N,N,...", help="Layers of each stage. Default: as even as embedding and head allow."
    ),
    click.option("--zero-config", metavar="FILE", help="DeepSpeed's configuration, as it is; implies --zero."),
    click.option("--zero-grad", metavar="HOW", help="set_to_none (default) or zeros."),
    click.option(
        "--zero-grad-at",
        metavar="WHEN",
        help=f"{', '.join(w.replace('_', '-') for w in ZERO_GRAD_AT)}; the first is usual.",
    ),
    click.option(
        "--seq-lens", metavar="N,N,...", help="Sequence lengths of one batch after the other, e.g. 100,128,115."
    ),
    click.option(
        "--attention-mask",
        metavar="WHICH",
        help=f"The mask that batches carry (hf: models of text): {' or '.join(ATTENTION_MASKS)}. Default none.",
    ),
    click.option("--last-batch", type=POSITIVE, metavar="N", help="Rows of the last, smaller batch of an epoch."),
    click.option(
        "--eval-batches",
        type=POSITIVE,
        metavar="N",
        help="Batches that are evaluated without gradients after each epoch.",
    ),
    click.option("--eval-batch-size", type=POSITIVE, metavar="N", help="Rows of those. Default: as in training."),
    click.option(
        "--steps-per-epoch",
        type=POSITIVE,
        metavar="N",
        help="Optimizer steps of an epoch. Default: those that go through every length, at least 2.",
    ),
    *VALUE_OPTIONS,
)

#: Options of ``generate``, by transformers' own names: parameter name -> how it is written.
_OF_GENERATION = {
    "do_sample": "--do-sample",
    "num_beams": "--num-beams",
    "num_return_sequences": "--num-return-sequences",
    "cache_implementation": "--cache-implementation",
    "cache_config": "--cache-config",
    "prefill_chunk_size": "--prefill-chunk-size",
    "generation_arg": "--generation-arg",
}
_GENERATION_OPTIONS = (
    click.option(
        "--generate",
        "--max-new-tokens",
        "generate",
        type=POSITIVE,
        metavar="N",
        help="Generate N tokens after a prompt of --seq-len (model.generate of transformers). Implies --inference.",
    ),
    click.option(
        "--do-sample/--no-do-sample", default=None, help="Draw tokens. Default: the model's own, else greedy."
    ),
    click.option("--num-beams", type=POSITIVE, metavar="N", help="Beams of a beam search."),
    click.option("--num-return-sequences", type=POSITIVE, metavar="N", help="Texts for each prompt."),
    click.option(
        "--cache-implementation", metavar="KIND", help=f"{', '.join(CACHE_IMPLEMENTATIONS[:5])}. Default: dynamic."
    ),
    click.option(
        "--cache-config",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of a quantized cache, e.g. backend=quanto, nbits=4. Repeatable.",
    ),
    click.option("--prefill-chunk-size", type=POSITIVE, metavar="N", help="Tokens of the prompt read at once."),
    click.option(
        "--generation-arg",
        multiple=True,
        metavar="NAME=VALUE",
        help="Another option of GenerationConfig, e.g. top_k=20, repetition_penalty=1.2. Repeatable.",
    ),
)

_SIZE_OPTIONS = (
    click.option(
        "-b", "--batch", "--batch-size", "batch", type=POSITIVE, metavar="N", help="Batch size (of a micro-batch)."
    ),
    click.option("-s", "--seq-len", type=POSITIVE, metavar="N", help="Sequence length of language models."),
)

_INPUT_OPTIONS = (
    *_SIZE_OPTIONS,
    click.option("--dim", multiple=True, metavar="NAME=VALUE", help="Bind a symbolic dimension. Repeatable."),
    click.option(
        "--input-shape",
        multiple=True,
        metavar="NAME:1x3x224x224",
        help="Shape of an input (NAME:scalar for none). Repeatable.",
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
    click.option(
        "--format", "form", type=click.Choice(["table", "json", "html"]), default="table", help="Default table."
    ),
    click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout."),
    click.option("--fail-on-oom", is_flag=True, help="Exit with 3 when it does not fit the card."),
    click.option("--budget", metavar="SIZE", help="Exit with 3 when it needs more device memory, e.g. 16GiB."),
)


def model_options(command: Command) -> Command:
    """MODEL and everything that says what its step is."""
    decorated = grouped("Generation (transformers)", _GENERATION_OPTIONS)(cudnn_options(command))
    decorated = grouped("Sizes and inputs", _INPUT_OPTIONS)(grouped("Step", _STEP_OPTIONS)(decorated))
    return click.argument("model")(decorated)


def cudnn_options(command: Command) -> Command:
    """Whether a cuDNN is asked."""
    return grouped("Card, runtime and allocator", _CUDNN_OPTIONS)(command)


def measured_step_options(command: Command) -> Command:
    """What says how a model is run, without what says how a file is read."""
    decorated = command
    for option in reversed((*_MEASURED_OPTIONS, *_STEP_OPTIONS)):
        decorated = option(decorated)
    return decorated


def plan_output_options(*forms: str) -> Callable[[Command], Command]:
    """What a command that runs several analyses shows, in one of ``forms``, and where it goes."""
    options = (
        click.option("--format", "form", type=click.Choice(forms), default=forms[0], help=f"Default {forms[0]}."),
        click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout."),
    )
    return grouped("Output", options)


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
    form: str
    output: str | None
    fail_on_oom: bool
    budget_bytes: int | None = None


def step_of(model: str, given: Mapping[str, Any]) -> Training | Inference:
    """The step the options describe. Raises :class:`UsageError` for a value or a combination that is not accepted."""
    chosen = [written for name, written in _TRAINING_ONLY.items() if _is_given(given[name])]
    training = given["training"]
    mode = given["compile_mode"] or ("default" if given["compile_"] else None)
    values = values_of(given)
    generation = _generation(given)
    own = ("dtype", "amp", "weights", "attention_mask")
    plain = not chosen and generation is None and all(given[name] is None for name in own)
    if model.startswith("zoo:") and plain:
        from graphmem.sources.zoo import usual_step

        usual = usual_step(model.removeprefix("zoo:"), training=training is not False)
        return replace(usual, data_dependent=given["data_dependent"] or usual.data_dependent, compile=mode, **values)
    if training is None:
        is_inference = given["weights"] is not None or generation is not None or Path(model).suffix.lower() == ".onnx"
        training = bool(chosen) or not is_inference
    if not training:
        if chosen:
            raise UsageError(f"{chosen[0]} is an option of training; leave it or --inference out")
        return Inference(
            given["dtype"] or "fp32",
            given["amp"],
            given["data_dependent"],
            mode,
            weights=given["weights"],
            attention_mask=given["attention_mask"],
            tp=given["tp"],
            ep=given["ep"],
            generate=generation,
            **values,
        )
    if generation is not None:
        raise UsageError(f"--generate is inference; leave out {chosen[0] if chosen else '--training'}")
    if given["weights"] is not None:
        raise UsageError(
            f"quantised weights are not trained: give --weights {weights_named(given['weights'])} with --inference; a "
            "program that trains adapters on them (QLoRA) is analysed by graphmem run"
        )
    return Training(
        optimizer=given["optimizer"] or "adamw",
        optimizer_args=tuple(parse_optimizer_arg(text) for text in given["optimizer_arg"]),
        dtype=given["dtype"] or "fp32",
        amp=given["amp"],
        checkpoint_activations=given["checkpoint_activations"],
        grad_accum=given["grad_accum"] or 1,
        clip_grad_norm=given["clip_grad_norm"],
        zero_grad=given["zero_grad"] or "set_to_none",
        zero_grad_at=(given["zero_grad_at"] or "after_step").replace("-", "_"),
        loop=given["loop"] or "hold",
        grad_scaler=given["grad_scaler"],
        lr_scheduler=given["lr_scheduler"],
        seq_lens=parse_lengths(given["seq_lens"]) if given["seq_lens"] is not None else (),
        last_batch=given["last_batch"],
        eval_batches=given["eval_batches"] or 0,
        eval_batch_size=given["eval_batch_size"],
        steps_per_epoch=given["steps_per_epoch"],
        ddp=_data_parallel(given),
        fsdp=_fully_shard(given),
        zero=_zero(given),
        tp=given["tp"],
        ep=given["ep"],
        pp=_pipeline(given),
        cp=given["cp"],
        sp=given["sp"],
        tp_plan=_tp_plan(given["tp_plan"]),
        world_size=given["world_size"],
        rank=given["rank"] or 0,
        nproc_per_node=given["nproc_per_node"],
        data_dependent=given["data_dependent"],
        compile=mode,
        attention_mask=given["attention_mask"],
        **values,
    )


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of values: of lines, and how much of the host is real."""
    values: dict[str, Any] = {"assume": tuple(parse_assumption(text) for text in given["assume"])}
    if given["host_values"] is not None:
        values["host_values_mb"] = given["host_values"]
    return values


def _data_parallel(given: Mapping[str, Any]) -> DataParallel | None:
    if not given["ddp"]:
        if given["ddp_option"]:
            raise UsageError("--ddp-option needs --ddp")
        return None
    if given["world_size"] is None:
        raise UsageError("--ddp needs --world-size, the number of processes")
    known = [field.name for field in fields(DataParallel) if field.name != "world_size"]
    options = dict(parse_optimizer_arg(text) for text in given["ddp_option"])
    for name in options:
        if name not in known:
            raise UsageError(f"unknown --ddp-option {name!r}; accepted: {', '.join(known)}")
    return DataParallel(given["world_size"], **options)  # type: ignore[arg-type]


def _fully_shard(given: Mapping[str, Any]) -> FullyShard | None:
    if given["fsdp"] is None:
        for name in ("fsdp_shard", "fsdp_offload", "fsdp_sync_each_batch"):
            if given[name]:
                raise UsageError(f"{_TRAINING_ONLY[name]} needs --fsdp")
        return None
    processes = given["fsdp"] or given["world_size"]
    if processes is None:
        raise UsageError("--fsdp needs the number of processes: --fsdp 8, or --world-size 8")
    shard = given["fsdp_shard"] or "full"
    return FullyShard(processes, shard, given["fsdp_offload"], given["fsdp_sync_each_batch"])


def _tp_plan(path: str | None) -> tuple[tuple[str, str], ...]:
    if path is None:
        return ()
    try:
        plan = read_json(Path(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    try:
        return checked_plan(plan)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _pipeline(given: Mapping[str, Any]) -> PipelineParallel | None:
    if given["pp"] is None:
        for name in ("schedule", "micro_batches", "pp_layers"):
            if given[name] is not None:
                raise UsageError(f"{_TRAINING_ONLY[name]} needs --pp")
        return None
    layers = given["pp_layers"] or ""
    try:
        counts = tuple(int(count) for count in layers.split(",")) if layers else ()
    except ValueError:
        raise UsageError(f"--pp-layers is the layers of each stage, as 8,8,8,8, not {layers!r}") from None
    return PipelineParallel(given["pp"], given["schedule"] or "1f1b", given["micro_batches"], counts)


def _zero(given: Mapping[str, Any]) -> ZeRO | None:
    if given["zero"] is None and given["zero_config"] is None:
        return None
    if given["world_size"] is None:
        raise UsageError("--zero needs --world-size, the number of processes")
    return ZeRO(given["world_size"], given["zero"], given["zero_config"] or "{}")


def _generation(given: Mapping[str, Any]) -> Generation | None:
    if given.get("generate") is None:
        for name, written in _OF_GENERATION.items():
            if _is_given(given.get(name)) or given.get(name) is False:
                raise UsageError(f"{written} needs --generate, the number of tokens")
        return None
    return Generation(
        given["generate"],
        given["do_sample"],
        given["num_beams"],
        given["num_return_sequences"],
        given["cache_implementation"],
        tuple(parse_optimizer_arg(text) for text in given["cache_config"]),
        given["prefill_chunk_size"],
        tuple(parse_optimizer_arg(text) for text in given["generation_arg"]),
    )


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ()


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


def dims_of(texts: tuple[str, ...]) -> dict[str, int]:
    """Read ``NAME=VALUE`` pairs. Raises :class:`UsageError`."""
    dims: dict[str, int] = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        if not separator or not name or not re.fullmatch(r"[0-9]{1,18}", value):
            raise UsageError(f"cannot read dimension {text!r}; write NAME=VALUE, for example batch=16")
        dims[name] = int(value)
    return dims


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
        "iterations": options["iterations"],
        "build_on": options["build_on"],
        "cudnn": options["cudnn"],
        "trust": options["trust"],
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
    names = ("top", "details", "form", "output", "fail_on_oom")
    budget = None if options["budget"] is None else parse_bytes(options["budget"])
    return Output(**{name: options[name] for name in names}, budget_bytes=budget)
