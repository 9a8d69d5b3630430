"""Options of the step (an iteration, a forward pass, a generation), and their translation into the library's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from graphmem.base.documents import read_json
from graphmem.errors import UsageError
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

POSITIVE = click.IntRange(min=1)

#: Which of several processes is analysed.
RANK_OPTION = click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Which of the processes is analysed. Default 0."
)

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
    "prefetch": "--prefetch",
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
        "--bounds",
        is_flag=True,
        help="Analyse what follows where such a line reads another value, too: how far figures may be off.",
    ),
    click.option(
        "--host-values",
        type=click.IntRange(0, MOST_HOST_MIB),
        metavar="MIB",
        help="Host tensors up to this size hold real data, eight times as much together. Default 64.",
    ),
)

STEP_OPTIONS = (
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
    click.option(
        "--prefetch",
        type=click.IntRange(min=0),
        metavar="N",
        help="Batches that a loader moves to the card ahead of the step, on a stream of their own. Default 0.",
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
    "assistant_model": "--assistant-model",
    "num_assistant_tokens": "--num-assistant-tokens",
    "prompt_lookup_num_tokens": "--prompt-lookup-num-tokens",
    "accepted": "--accepted",
    "generation_arg": "--generation-arg",
}

#: Options of drafts that are arguments of the generation.
_DRAFTED = ("num_assistant_tokens", "prompt_lookup_num_tokens")

GENERATION_OPTIONS = (
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
    click.option("--assistant-model", metavar="hf:NAME", help="A smaller model that drafts tokens, in the same dtype."),
    click.option("--num-assistant-tokens", type=POSITIVE, metavar="N", help="Tokens of a draft. Default: the model's."),
    click.option(
        "--prompt-lookup-num-tokens",
        type=POSITIVE,
        metavar="N",
        help="Draft N tokens from the text itself.",
    ),
    click.option(
        "--accepted",
        type=click.IntRange(min=0),
        metavar="N",
        help="Drafted tokens of a round that are right. Default: all and none are tried, the larger one is shown.",
    ),
    click.option(
        "--generation-arg",
        multiple=True,
        metavar="NAME=VALUE",
        help="Another option of GenerationConfig, e.g. top_k=20, repetition_penalty=1.2. Repeatable.",
    ),
)


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
        prefetch=given["prefetch"] or 0,
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
        given["assistant_model"],
        given["accepted"],
        (
            *((name, given[name]) for name in _DRAFTED if given[name] is not None),
            *(parse_optimizer_arg(text) for text in given["generation_arg"]),
        ),
    )


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ()
