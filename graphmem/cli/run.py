"""``graphmem run``: a whole program as it is, without a card."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from graphmem.cli.endings import OWN_PROCESS
from graphmem.cli.groups import GroupedCommand, grouped
from graphmem.cli.launch import Launch, launch_of
from graphmem.cli.options import (
    RANKS_OPTION,
    cudnn_options,
    output_of,
    output_options,
    ranks_of,
    target_of,
    target_options,
)
from graphmem.cli.output import check_output, show, working
from graphmem.cli.step_options import POSITIVE, RANK_OPTION, VALUE_OPTIONS, values_of
from graphmem.errors import UsageError
from graphmem.sources.hints import refuse_keras
from graphmem.training import Training
from graphmem.training.program import OPTIMIZER_STEPS, Program

#: Storages kept in the estimate for --details and JSON.
KEPT = 25
_MODULE = ("-m", "--module")
_ALLOW_WRITES = "--allow-writes"


class _Runs(GroupedCommand):
    """What follows the program, or ``-m`` and its module, is the program's own, as with ``python``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] == _ALLOW_WRITES:  # without a folder: the next word is not its value
                if len(args) > position + 2 and Path(args[position + 1]).is_dir():
                    raise UsageError(f"write {_ALLOW_WRITES}={args[position + 1]}, with = before the folder")
                args = [*args[:position], f"{_ALLOW_WRITES}=", *args[position + 1 :]]
            name = args[position]
            if name in _MODULE:
                args = [*args[: position + 2], "--", *args[position + 2 :]]
                break
            position += 2 if "=" not in name and self._takes_value(ctx, name) else 1
        return super().parse_args(ctx, args)

    def _takes_value(self, ctx: click.Context, name: str) -> bool:
        options = [
            p for p in self.get_params(ctx) if isinstance(p, click.Option) and name in (*p.opts, *p.secondary_opts)
        ]
        return any(not option.is_flag and not option.count for option in options)


_PROGRAM_OPTIONS = (
    click.option("-m", "--module", metavar="MODULE", help="Run a module (package.module) instead of a file."),
    click.option(
        "--iterations",
        type=POSITIVE,
        default=OPTIMIZER_STEPS,
        metavar="N",
        help=f"Optimizer steps after which the program's loops end. Default {OPTIMIZER_STEPS}.",
    ),
    *VALUE_OPTIONS,
    click.option("--quiet", is_flag=True, help="Do not show what the program prints."),
)


#: What a program may really do; by default nothing outside of the process.
_PERMISSION_OPTIONS = (
    click.option(
        _ALLOW_WRITES,
        "writes",
        metavar="[=DIR]",
        multiple=True,
        help="Let the program change files, below DIR or everywhere; weights that it saves are zeros. "
        "Default: changes go to a temporary folder.",
    ),
    click.option("--allow-network", is_flag=True, help="Let it connect to other processes and machines."),
    click.option(
        "--allow-processes",
        is_flag=True,
        help="Let it start other programs where these cannot be kept from changing files (Windows, macOS).",
    ),
)

#: As torchrun writes them; both with hyphens and with underscores.
_LAUNCH_OPTIONS = (
    click.option(
        "--nproc-per-node", "--nproc_per_node", type=POSITIVE, metavar="N", help="As torchrun: processes a machine."
    ),
    click.option("--nnodes", type=POSITIVE, metavar="N", help="As torchrun: machines. Default 1."),
    click.option(
        "--node-rank", "--node_rank", type=click.IntRange(min=0), metavar="N", help="Which of them. Default 0."
    ),
    RANK_OPTION,
    RANKS_OPTION,
    click.option("--master-addr", "--master_addr", metavar="HOST", help="What MASTER_ADDR is set to."),
    click.option("--master-port", "--master_port", type=POSITIVE, metavar="PORT", help="What MASTER_PORT is set to."),
    click.option("--config", metavar="FILE.yaml", help="A configuration of accelerate, as accelerate launch reads it."),
)


@click.command(
    "run",
    cls=_Runs,
    short_help="A whole program as it is: what it would need on a card.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py [ITS ARGUMENTS]...")
@grouped("Program", _PROGRAM_OPTIONS)
@grouped("Sandbox", _PERMISSION_OPTIONS)
@grouped("Launcher", _LAUNCH_OPTIONS)
@cudnn_options
@target_options
@output_options
def run_command(words: tuple[str, ...], module: str | None, quiet: bool, **options: Any) -> None:
    """Run SCRIPT.py with its arguments as python would, without a card, and say what it would need on one.

    Options of graphmem stand before the program; what follows belongs to the program. Its loops end after --iterations
    optimizer steps, and what comes after them (evaluation, generation, saving) runs too. What it prints goes to stderr.
    It changes no file and reaches no other machine: what it writes and deletes is in a temporary folder, which it reads
    through, and the report lists it. The checkpoints that it saves have their true size and no weights.

    \b
      graphmem run --gpu RTX-4090 train.py --batch-size 16
      graphmem run --gpu A100-80GB -m package.train config/small.py

    Exit codes: 0 done, 1 error or the program failed, 2 wrong options, 3 does not fit (with --fail-on-oom).
    """
    output = output_of(options)
    check_output(output.output)
    launch = launch_of(**{name: options[name] for name in _LAUNCH_NAMES})
    program = _program(words, module, launch)
    step = Training(data_dependent=options["data_dependent"], **_numbers(launch, options), **values_of(options))
    from graphmem.sandbox import Permissions, entered, folder_of

    permissions = Permissions(
        tuple(folder_of(one) for one in options["writes"] if one),
        everywhere="" in options["writes"],
        network=options["allow_network"],
        processes=options["allow_processes"],
    )
    own_process = click.get_current_context().find_root().obj is OWN_PROCESS
    with entered(permissions, own_process=own_process), working() as progress, _silenced(quiet):
        from graphmem.analyze import analyze

        estimate = analyze(
            program,
            training=step,
            iterations=options["iterations"],
            cudnn=options["cudnn"],
            ranks=ranks_of(options),
            top=max(output.top, KEPT),
            bounds=options["bounds"],
            progress=progress,
            **target_of(options),
        )
    show(estimate, output)
    ending = estimate.details["program"]
    if ending["code"]:
        click.echo(f"graphmem: {program.name}: {ending['words']}", err=True)
        click.get_current_context().exit(1)


_LAUNCH_NAMES = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "config")


def _numbers(launch: Launch, options: dict[str, Any]) -> dict[str, Any]:
    """Which process of how many. Raises :class:`UsageError`."""
    started, rank = launch.processes, options["rank"]
    if started is None:
        if rank is not None or options["ranks"] is not None:
            raise UsageError("--rank and --ranks need --nproc-per-node, or a --config with several processes")
        return {}
    if rank is not None and options["node_rank"] is not None:
        raise UsageError("--rank says which process of all is analysed; leave out --node-rank, or --rank")
    return {
        "world_size": started.world_size,
        "rank": started.rank if rank is None else rank,
        "nproc_per_node": started.per_node,
    }


def _program(words: tuple[str, ...], module: str | None, launch: Launch) -> Program:
    if module is not None:
        return Program(module, words, True, launch.environment, launch.words)
    if not words:
        raise UsageError("no program given; write graphmem run train.py, or graphmem run -m package.module")
    if Path(words[0]).suffix in (".onnx", ".pt2"):
        raise UsageError(f"{words[0]} is a model and no program; write graphmem analyze {words[0]}")
    refuse_keras(Path(words[0]))
    return Program(words[0], words[1:], False, launch.environment, launch.words)


@contextlib.contextmanager
def _silenced(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        stdout, stderr = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = stdout, stderr
