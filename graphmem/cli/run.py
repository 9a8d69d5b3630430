"""``graphmem run``: a whole program as it is, without a card."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from graphmem.base.options import Whole, option, option_of
from graphmem.cli.endings import OWN_PROCESS
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.launch import Launch, launch_of
from graphmem.cli.options import BOUNDS, CARD, CUDNN, RANKS, Output, Target
from graphmem.cli.output import check_output, show, working
from graphmem.cudnn.library import AUTO
from graphmem.errors import UsageError
from graphmem.sources.hints import refuse_keras
from graphmem.training import Assumed, Training
from graphmem.training.processes import Processes
from graphmem.training.program import EPOCH_SECONDS, OPTIMIZER_STEPS, Program

#: Storages kept in the estimate for --details and JSON.
KEPT = 25
_MODULE = ("-m", "--module")
_ALLOW_WRITES = "--allow-writes"


class _Runs(GroupedCommand):
    """A command: words after the program, or after ``-m`` and its module, are the program's own, as of ``python``."""

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


@dataclass(frozen=True)
class Followed:
    """The program, how far it is followed, and the known ones of the values that it reads."""

    module: str | None = option(
        None, "Run a module (package.module) instead of a file.", flags="-m --module", metavar="MODULE"
    )
    iterations: int = option(OPTIMIZER_STEPS, "Optimizer steps after which the program's loops end.", Whole())
    epoch: str = option(
        "auto",
        f"Batches whose shapes are looked at behind those of the steps, the largest of which are analysed too: as many "
        f"as are read in {EPOCH_SECONDS:.0f} seconds (auto), none (first), all, or the next N (sample N).",
        metavar="auto|first|all|'sample N'",
    )
    data_dependent: float | None = option(None, option_of(Training, "data_dependent"))
    assume: tuple[tuple[str, Assumed], ...] = option((), option_of(Training, "assume"))
    bounds: bool = option(False, BOUNDS)
    host_values_mb: int = option(64, option_of(Training, "host_values_mb"))
    quiet: bool = option(False, "Do not show what the program prints.")


@dataclass(frozen=True)
class Allowed:
    """Permissions of a program; by default it changes nothing outside of the process."""

    writes: tuple[str, ...] = option(
        (),
        "Let the program change files, below DIR or everywhere; weights that it saves are zeros. Default: changes go "
        "to a temporary folder.",
        flags=_ALLOW_WRITES,
        metavar="[=DIR]",
        repeated=True,
    )
    network: bool = option(False, "Let it connect to other processes and machines.", flags="--allow-network")
    processes: bool = option(
        False,
        "Let it start other programs where these cannot be kept from changing files (Windows, macOS).",
        flags="--allow-processes",
    )


@dataclass(frozen=True)
class Launcher:
    """As torchrun writes them; both with hyphens and with underscores."""

    nproc_per_node: int | None = option(
        None, "As torchrun: processes a machine.", Whole(), flags="--nproc-per-node --nproc_per_node"
    )
    nnodes: int | None = option(None, "As torchrun: machines. Default 1.", Whole())
    node_rank: int | None = option(None, "Which of them. Default 0.", Whole(0), flags="--node-rank --node_rank")
    rank: int | None = option(None, option_of(Training, "rank"), check=Whole(0))
    ranks: str | Sequence[int] | None = option(None, RANKS)
    master_addr: str | None = option(
        None, "What MASTER_ADDR is set to.", flags="--master-addr --master_addr", metavar="HOST"
    )
    master_port: int | None = option(
        None, "What MASTER_PORT is set to.", Whole(), flags="--master-port --master_port", metavar="PORT"
    )
    config: str | None = option(
        None, "A configuration of accelerate, as accelerate launch reads it.", metavar="FILE.yaml"
    )


@dataclass(frozen=True)
class Asked(Target):
    """The card, and the cuDNN that is asked."""

    cudnn: str = option(AUTO, CUDNN, heading=CARD)


@click.command(
    "run",
    cls=_Runs,
    short_help="A whole program as it is: what it would need on a card.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py [ITS ARGUMENTS]...")
@takes("followed", Followed, "Program")
@takes("allowed", Allowed, "Sandbox")
@takes("launcher", Launcher, "Launcher")
@takes("asked", Asked)
@takes("output", Output, "Output")
def run_command(
    words: tuple[str, ...], followed: Followed, allowed: Allowed, launcher: Launcher, asked: Asked, output: Output
) -> None:
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
    check_output(output.output)
    launch = _launch(launcher)
    program = replace(_program(words, followed.module, launch), epoch=followed.epoch)
    from graphmem.sandbox import Permissions, entered, folder_of

    permissions = Permissions(
        tuple(folder_of(one) for one in allowed.writes if one),
        everywhere="" in allowed.writes,
        network=allowed.network,
        processes=allowed.processes,
    )
    own_process = click.get_current_context().find_root().obj is OWN_PROCESS
    with (
        entered(permissions, own_process=own_process),
        working(shows_warnings=True) as progress,
        _silenced(followed.quiet),
    ):
        from graphmem.analyze import analyze

        estimate = analyze(
            program,
            training=_step(followed, launcher, launch.processes),
            iterations=followed.iterations,
            ranks=launcher.ranks,
            top=max(output.top, KEPT),
            bounds=followed.bounds,
            progress=progress,
            **vars(asked),
        )
    show(estimate, output)
    ending = estimate.details["program"]
    if ending["code"]:
        click.echo(f"graphmem: {program.name}: {ending['words']}", err=True)
        click.get_current_context().exit(1)


def _launch(launcher: Launcher) -> Launch:
    one = launcher
    return launch_of(one.nproc_per_node, one.nnodes, one.node_rank, one.master_addr, one.master_port, one.config)


def _step(followed: Followed, launcher: Launcher, started: Processes | None) -> Training:
    """The step: values that are known, and the process that is analysed. Raises :class:`UsageError`."""
    step = Training(
        data_dependent=followed.data_dependent, assume=followed.assume, host_values_mb=followed.host_values_mb
    )
    rank = launcher.rank
    if started is None:
        if rank is not None or launcher.ranks is not None:
            raise UsageError("--rank and --ranks need --nproc-per-node, or a --config with several processes")
        return step
    if rank is not None and launcher.node_rank is not None:
        raise UsageError("--rank says which process of all is analysed; leave out --node-rank, or --rank")
    rank = started.rank if rank is None else rank
    return replace(step, world_size=started.world_size, rank=rank, nproc_per_node=started.per_node)


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
