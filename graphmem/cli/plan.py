"""``graphmem plan``: which layout over several cards fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphmem.base.files import write_whole
from graphmem.base.options import REQUIRED, Whole, option, option_of
from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, built, takes
from graphmem.cli.options import STEP, Request, form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.errors import UsageError
from graphmem.reports import Format
from graphmem.training import OptionValue, Training
from graphmem.workers import Workers

if TYPE_CHECKING:
    from graphmem.planning.layouts.communication import Links
    from graphmem.planning.layouts.configuration import File

_CARDS, _SEARCH = "Cards", "Search"


def _read_links(text: str) -> Links:
    from graphmem.planning.layouts.communication import Links

    try:
        if re.fullmatch(r"[0-9.]{1,8}(,[0-9.]{1,8}){1,2}", text):
            return Links(*(float(one) for one in text.split(",")))
    except ValueError:
        pass  # two points in a number
    raise UsageError(f"cannot read --links {text!r}; write GB/s in a machine and between them: 450,50")


@dataclass(frozen=True)
class Step:
    """The step, without the options that share it out."""

    optimizer: str = option("adamw", option_of(Training, "optimizer"))
    optimizer_args: tuple[tuple[str, OptionValue], ...] = option((), option_of(Training, "optimizer_args"))
    dtype: str = option("fp32", option_of(Training, "dtype"))
    amp: str = option(
        "bf16", "Precision of computation: bf16, fp16, off. Default: bf16; fp16 on cards without it.", metavar="TYPE"
    )
    clip_grad_norm: float | None = option(None, option_of(Training, "clip_grad_norm"))
    loop: str = option("hold", option_of(Training, "loop"))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question about layouts, as :func:`graphmem.plan` names it."""

    gpus: str = option(REQUIRED, "The cards, e.g. 16xH100-80GB; see 'graphmem gpus'.", metavar="NxCARD", heading=_CARDS)
    nodes: int | None = option(None, "Machines. Default: of 8 cards each.", Whole())
    links: Links | None = option(
        None, "GB/s of a card: in a machine, between them, to the host.", metavar="A,B[,C]", read=_read_links
    )
    global_batch: str = option(REQUIRED, "Of a step: sequences, or tokens (1M-tokens).", metavar="N", heading="Batch")
    seq_len: int | None = option(None, "Tokens of a sequence.", Whole(), flags="-s --seq-len")
    training: Training = option(
        REQUIRED, "The step.", parts=(Step,), make=lambda given: Training(**vars(built(Step, given))), heading=STEP
    )
    torch_version: str | None = option(None, option_of(Request, "torch_version"))
    alloc_conf: str | None = option(None, "PYTORCH_ALLOC_CONF. Default: also segments that grow.", metavar="CONF")
    margin: str | None = option(None, option_of(Request, "margin"))
    frameworks: tuple[str, ...] | None = option(
        None,
        "ddp, fsdp, deepspeed. Default: all that are installed.",
        metavar="A,B",
        read=lambda text: tuple(text.split(",")),
        heading=_SEARCH,
    )
    confirm: int = option(8, "Captures at most.", Whole())
    advice: bool = option(True, "Try what saves memory in the best one. Default: yes.")


def _folder(text: str) -> Path:
    folder = Path(text)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write into {text}: it is no directory")
    return folder


@dataclass(frozen=True)
class Configuration:
    """Where the configuration of the best layout goes."""

    write: Path | None = option(
        None, "Write the frameworks' configuration of the best one there.", metavar="FOLDER", read=_folder
    )


@click.command("plan", cls=GroupedCommand)
@click.argument("model", shell_complete=models)
@takes("asked", Asked)
@takes("workers", Workers, "Workers")
@form_options
@takes("", Configuration, "Output")
def plan_command(
    model: str, asked: Asked, workers: Workers, form: Format, output: str | None, write: Path | None
) -> None:
    """Which layout of MODEL's training over several cards fits: data, sharding, tensor and expert parallelism,
    micro-batch, recomputation, offloading.

    Layouts that cannot fit are refused by what they need at least; of the others the cheapest are captured (deep models
    with a few layers, from which all are written), and the first one's configuration is written for its framework. For
    example:

    \b
      graphmem plan hf:./llama --gpus 16xH100-80GB --nodes 2 \\
        --global-batch 1M-tokens -s 8192
      graphmem plan train.py:build --gpus 2xRTX-4090 --global-batch 32 \\
        --write configuration

    Exit codes: 0 done, 1 error or a wrong value, 2 options that cannot be read, 3 nothing fits of what was captured.
    """
    check_output(output)
    with working() as progress:
        from graphmem.planning.layouts.plan import plan

        found = plan(model, **{**vars(asked), **vars(workers), "training": _on_these_cards(asked)}, say=progress)
    publish(found, form, output)
    if write is not None and found.files:
        _write(write, found.files)
    if not found.fitting:
        click.get_current_context().exit(DOES_NOT_FIT)


def _on_these_cards(asked: Asked) -> Training:
    """The step, in the half type of the cards where none was asked for."""
    from graphmem.planning.layouts.cluster import cluster_of, half_of

    if click.get_current_context().get_parameter_source("amp") is not click.core.ParameterSource.DEFAULT:
        return asked.training
    return replace(asked.training, amp=half_of(cluster_of(asked.gpus, asked.nodes).card))


def _write(folder: Path, files: Sequence[File]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None
    for one in files:
        write_whole(folder / one.name, one.text)
    click.echo(f"wrote {', '.join(one.name for one in files)} into {folder}", err=True)
