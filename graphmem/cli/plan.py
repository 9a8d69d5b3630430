"""``graphmem plan``: which layout over several cards fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphmem.base.files import write_whole
from graphmem.cli.groups import GroupedCommand, grouped
from graphmem.cli.options import FORM_OPTIONS, form_of
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.errors import UsageError
from graphmem.training import Training, parse_optimizer_arg

if TYPE_CHECKING:
    from graphmem.planning.layouts.communication import Links
    from graphmem.planning.layouts.configuration import File

_CLUSTER = (
    click.option("--gpus", required=True, metavar="NxCARD", help="The cards, e.g. 16xH100-80GB; see 'graphmem gpus'."),
    click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Machines. Default: of 8 cards each."),
    click.option("--links", metavar="A,B[,C]", help="GB/s of a card: in a machine, between them, to the host."),
)
_BATCH = (
    click.option("--global-batch", required=True, metavar="N", help="Of a step: sequences, or tokens (1M-tokens)."),
    click.option("-s", "--seq-len", type=click.IntRange(min=1), metavar="N", help="Tokens of a sequence."),
)
_STEP = (
    click.option("--optimizer", default="adamw", metavar="NAME", help="Default adamw."),
    click.option("--optimizer-arg", multiple=True, metavar="NAME=VALUE", help="An option of it. Repeatable."),
    click.option("--dtype", default="fp32", metavar="TYPE", help="Precision of weights. Default fp32."),
    click.option("--amp", default="bf16", metavar="TYPE", help="Precision of computation: bf16, fp16, off."),
    click.option("--clip-grad-norm", type=float, metavar="NORM", help="Clip the gradients to this norm."),
    click.option("--loop", default="hold", metavar="HOW", help="hold (default) or drop; see 'graphmem analyze'."),
    click.option("--torch-version", metavar="X.Y", help="Version of PyTorch to predict. Default: the installed one."),
    click.option("--alloc-conf", metavar="CONF", help="PYTORCH_ALLOC_CONF. Default: also segments that grow."),
    click.option("--margin", metavar="p99", help="How sure 'fits' must be, as of 'graphmem analyze'."),
)
_SEARCH = (
    click.option("--frameworks", metavar="A,B", help="ddp, fsdp, deepspeed. Default: all that are installed."),
    click.option("--confirm", type=click.IntRange(min=1), default=8, metavar="N", help="Captures at most. Default 8."),
    click.option("--advice/--no-advice", default=True, help="Try what saves memory in the best one. Default: yes."),
)
_OUTPUT = (
    *FORM_OPTIONS,
    click.option("--write", metavar="FOLDER", help="Write the frameworks' configuration of the best one there."),
)


#: Options that are the library's parameters as they are.
_PASSED_ON = ("model", "gpus", "nodes", "global_batch", "seq_len", "confirm", "advice", "torch_version", "alloc_conf",
              "margin")  # fmt: skip


@click.command("plan", cls=GroupedCommand, short_help="Which layout over several cards fits.")
@click.argument("model")
@grouped("Cards", _CLUSTER)
@grouped("Batch", _BATCH)
@grouped("Step", _STEP)
@grouped("Search", _SEARCH)
@grouped("Output", _OUTPUT)
def plan_command(**options: Any) -> None:
    """Which layout of MODEL's training over several cards fits: data, sharding, tensor and expert parallelism,
    micro-batch, recomputation, offloading.

    Layouts that cannot fit are refused by what they need at least; of the others the cheapest are captured, each figure
    is such a capture, and the first one's configuration is written for its framework. For example:

    \b
      graphmem plan hf:./llama --gpus 16xH100-80GB --nodes 2 \\
        --global-batch 1M-tokens -s 8192
      graphmem plan train.py:build --gpus 2xRTX-4090 --global-batch 32 \\
        --write configuration

    Exit codes: 0 done, 1 error, 2 wrong options, 3 nothing fits of what was captured.
    """
    check_output(options["output"])
    folder = _folder(options["write"])
    step = Training(
        optimizer=options["optimizer"],
        optimizer_args=tuple(parse_optimizer_arg(text) for text in options["optimizer_arg"]),
        dtype=options["dtype"],
        amp=options["amp"],
        clip_grad_norm=options["clip_grad_norm"],
        loop=options["loop"],
    )
    with working() as progress:
        from graphmem.planning.layouts.plan import plan

        found = plan(
            **{name: options[name] for name in _PASSED_ON},
            training=step,
            frameworks=None if options["frameworks"] is None else options["frameworks"].split(","),
            links=_links(options["links"]),
            say=progress,
        )
    publish(found, form_of(options), options["output"])
    if folder is not None and found.files:
        _write(folder, found.files)
    if not found.fitting:
        click.get_current_context().exit(DOES_NOT_FIT)


def _links(text: str | None) -> Links | None:
    if text is None:
        return None
    from graphmem.planning.layouts.communication import Links

    try:
        if re.fullmatch(r"[0-9.]{1,8}(,[0-9.]{1,8}){1,2}", text):
            return Links(*(float(one) for one in text.split(",")))
    except ValueError:
        pass  # two points in a number
    raise UsageError(f"cannot read --links {text!r}; write GB/s in a machine and between them: 450,50")


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    folder = Path(text)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cannot write into {text}: it is no directory")
    return folder


def _write(folder: Path, files: Sequence[File]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None
    for one in files:
        write_whole(folder / one.name, one.text)
    click.echo(f"wrote {', '.join(one.name for one in files)} into {folder}", err=True)
