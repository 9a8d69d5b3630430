"""``graphmem run``: a whole program as it is, without a card."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click

from graphmem import sandbox
from graphmem.base.environment import changed, having
from graphmem.base.files import write_whole
from graphmem.base.options import Whole, option, option_of
from graphmem.cli.command_line import launch_of, program_or_command
from graphmem.cli.endings import OWN_PROCESS
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import BOUNDS, CARD, CUDNN, RANKS, Limits, Output, Target
from graphmem.cli.output import check_output, show, show_largest, working
from graphmem.cudnn.library import AUTO
from graphmem.devices import Device
from graphmem.errors import GraphmemError, NothingOnDevice, SourceError, UsageError
from graphmem.estimate import Estimate
from graphmem.following import Following, Reported, beside, children, following, hand_over, handed, launchers
from graphmem.training import Assumed, Training
from graphmem.training.processes import Processes
from graphmem.training.program import (
    EPOCH_BATCHES,
    EPOCH_NUMBERS,
    OPTIMIZER_STEPS,
    SHORT_EVENTS,
    DataSet,
    Program,
    parse_data_set,
)

#: Options with a program as their value, behind which all words are the program's.
_NAMED = ("-m", "--module", "-c", "--code")
#: Options of a process that is not passed on to those that it starts.
_OF_ONE = ("-o", "--output", "--rank", "--cards", "--config", "--quiet", "--fail-on-oom", "--budget")
_OWN_WORDS = "graphmem.own_words"  # where a click context keeps the options as they were written
_WHOLE_LINE = "graphmem.whole_line"  # and all words, the program's too
#: Where the number stands that is searched.
_PLACE = "{}"
#: The variable that names the file to which a run gives its whole estimate, in place of its report.
_GIVEN_TO = "GRAPHMEM_GIVEN_TO"
_ALLOW_WRITES = "--allow-writes"


class _Runs(GroupedCommand):
    """A command: words after the program, or after ``-m`` and its module, are the program's own, as of ``python``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        position, ctx.meta[_OWN_WORDS], ctx.meta[_WHOLE_LINE] = 0, [], list(args)
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] == _ALLOW_WRITES:  # without a folder: the next word is not its value
                if len(args) > position + 2 and Path(args[position + 1]).is_dir():
                    raise UsageError(f"write {_ALLOW_WRITES}={args[position + 1]}, with = before the folder")
                args = [*args[:position], f"{_ALLOW_WRITES}=", *args[position + 1 :]]
            name = args[position]
            if name in _NAMED:
                args = [*args[: position + 2], "--", *args[position + 2 :]]
                break
            before, position = position, position + (2 if "=" not in name and self._takes_value(ctx, name) else 1)
            if name.partition("=")[0] not in _OF_ONE:
                ctx.meta[_OWN_WORDS] += args[before:position]
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
    code: str | None = option(None, "Run this program text instead of a file.", flags="-c --code", metavar="TEXT")
    iterations: int | None = option(
        None,
        f"Optimizer steps after which the program's loops end. By default {OPTIMIZER_STEPS}, or all steps of a program "
        f"where they are few events ({SHORT_EVENTS:,}).",
        Whole(),
    )
    epoch: str = option(
        "auto",
        f"Batches whose shapes are looked at behind those of the steps, the largest of which are analysed too: as many "
        f"as {EPOCH_BATCHES} batches or {EPOCH_NUMBERS >> 20} million numbers (auto), none (first), all, or the next N "
        "(sample N).",
        metavar="auto|first|all|'sample N'",
    )
    vocab: int | None = option(
        None, "Tokens of a tokenizer that the program names and that is not on this disk.", Whole(8, 1 << 24)
    )
    dataset: DataSet | None = option(
        None,
        "Rows of a data set that the program names and that is not on this disk, and the tokens in each. Columns: "
        "text, or messages, prompt+completion, ....",
        metavar="rows=N,tokens=N[,columns=NAME]",
        read=parse_data_set,
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
class Search:
    """Whether a number of the program's is searched."""

    largest: bool = option(
        False,
        "Find the largest number in place of {} (train.py --batch-size {}) with which the program fits the card; it is "
        "run for each number tried.",
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
    cards: int | None = option(
        None,
        "Cards of the machine, for programs and launchers that ask. Default: as CUDA_VISIBLE_DEVICES names, else 1.",
        Whole(),
    )
    config: str | None = option(None, "Start it by accelerate launch with this configuration.", metavar="FILE.yaml")


@dataclass(frozen=True)
class Asked(Target):
    """The card, and the cuDNN that is asked."""

    cudnn: str = option(AUTO, CUDNN, heading=CARD)


@click.command(
    "run",
    cls=_Runs,
    context_settings={"allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ITS ARGUMENTS]...")
@takes("followed", Followed, "Program")
@takes("search", Search, "Search")
@takes("limits", Limits, "Search")
@takes("allowed", Allowed, "Sandbox")
@takes("launcher", Launcher, "Launcher")
@takes("asked", Asked)
@takes("output", Output, "Output")
def run_command(
    words: tuple[str, ...],
    followed: Followed,
    search: Search,
    limits: Limits,
    allowed: Allowed,
    launcher: Launcher,
    asked: Asked,
    output: Output,
) -> None:
    """Run COMMAND as a shell would, without a card, and say what it would need on one.

    COMMAND is a Python script, a notebook, or any command line that starts Python: torchrun, accelerate launch,
    deepspeed, bash train.sh, the command of a package. Options of graphmem stand before it; what follows belongs to
    it. Its Python processes are followed; of several ranks one is (--rank), and no other is started. Long loops
    end after three optimizer steps (--iterations), or some more where these differ or larger batches come, and what
    comes after them (evaluation, generation, saving) runs too. What it prints goes to stderr. It changes no file
    and reaches no other machine: what it writes and deletes is in a temporary folder, which it reads through, and
    the report lists it. The checkpoints that it saves have their true size and no weights.

    \b
      graphmem run --gpu RTX-4090 train.py --batch-size 16
      graphmem run --gpu A100-80GB -m package.train config/small.py
      graphmem run --gpu H100 torchrun --nproc-per-node 8 --nnodes 2 train.py
      graphmem run --gpu H100 --cards 4 accelerate launch train.py
      graphmem run --gpu L4 train.ipynb
      graphmem run --gpu L4 --largest train.py --batch-size {}

    Exit codes: 0 done, 1 error, a wrong value, or the program failed, 2 options that cannot be read, 3 does not fit
    (with --fail-on-oom; with --largest, not even the smallest number).
    """
    is_followed = children.is_followed()
    given_to = os.environ.get(_GIVEN_TO)
    if not is_followed:
        check_output(output.output, output.html)
    if search.largest and not is_followed and given_to is None:
        _search(limits, asked, output)
        return
    if not search.largest and limits != Limits():
        raise UsageError("--multiple-of, --spare and --at-most are of a search: give --largest too")
    started = (launcher.nproc_per_node, launcher.nnodes, launcher.node_rank, launcher.master_addr, launcher.master_port)
    launch = launch_of(*started, launcher.config)
    line = program_or_command(words, followed.module, followed.code, launch)
    if isinstance(line, Program):
        line = replace(line, epoch=followed.epoch, vocab=followed.vocab, dataset=followed.dataset)
    analyzed = {
        "training": _step(followed, launcher, launch.processes, isinstance(line, Program)),
        "iterations": followed.iterations,
        "ranks": launcher.ranks if launch.processes is not None else None,
        "top": output.top,
        "bounds": followed.bounds,
        **vars(asked),
    }
    if is_followed:
        assert isinstance(line, Program)
        _run_for_parent(line, analyzed, allowed)
    with _flying(allowed), working(shows_warnings=True) as progress, _silenced(followed.quiet):
        environment = _told_environment(launcher.cards, allowed)
        with environment, _following(launcher, asked.device) as family:
            estimate = _estimate(line, family, {**analyzed, "progress": progress})
    if given_to is not None:
        write_whole(Path(given_to), handed.written(estimate.without_events()))
        return
    show(estimate, output)
    ending = estimate.details["program"]
    if ending["code"]:
        name = line.name if isinstance(line, Program) else shlex.join(line)
        click.echo(f"graphmem: {name}: {ending['words']}", err=True)
        click.get_current_context().exit(1)


# --- the largest number -----------------------------------------------------------------------------------------------


def _search(limits: Limits, asked: Asked, output: Output) -> None:
    """Show the largest number in place of ``{}`` with which the command fits its card. Raises :class:`UsageError`."""
    from graphmem.planning.fit_program import fit_program

    line = click.get_current_context().meta[_WHOLE_LINE]
    name = next((_name_before(line, at) for at, word in enumerate(line) if _PLACE in word), None)
    if name is None:
        raise UsageError(
            "--largest: write {} where the number stands: graphmem run --largest --gpu L4 train.py --batch-size {}"
        )
    if asked.device is None:
        raise UsageError("which card? give --gpu NAME or --gpu-memory SIZE, before the program")
    if output.html or output.opens or output.budget_bytes is not None or output.details or output.tree:
        raise UsageError(
            "--details, --tree, --html, --open and --budget do not go with --largest; a page is written by -o FILE.html"
        )
    with working() as progress:
        found = fit_program(name, lambda number: _attempt(line, number), say=progress, **vars(limits))
    show_largest(found, output.form, output.output, margin=asked.margin)


def _name_before(line: Sequence[str], at: int) -> str:
    """What the number in this word is called: ``batch-size`` of ``--batch-size {}``, ``bs`` of ``bs={}``."""
    word, before = line[at], line[at - 1] if at else ""
    named = word.partition(_PLACE)[0].rstrip("=:") if word != _PLACE else before if before.startswith("-") else ""
    return named.lstrip("-") or "number"


def _attempt(line: Sequence[str], number: int) -> Estimate:
    """The estimate of the command with a number, by ``graphmem run`` in a process of its own: what a program changes
    there, and in the folder that it writes to, is gone before the next. Raises :class:`SourceError`."""
    words = [word.replace(_PLACE, str(number)) for word in line]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "estimate.json")
        ended = subprocess.run(
            [sys.executable, "-m", "graphmem", "run", *words],
            env={**os.environ, _GIVEN_TO: str(file)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
        if file.is_file():
            estimate = handed.read(file.read_text(encoding="utf-8"))
            if estimate.fit is None:
                raise SourceError(estimate.details["program"]["words"])
            return estimate
    raise SourceError(_why(ended.stderr.decode(errors="replace")) or f"it ended with {ended.returncode}")


def _why(said: str) -> str:
    """What our process says of the program that failed, and the last line of the program's own."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("graphmem: ")][-1:]
    own = [line for line in lines if not line.startswith("graphmem: ")][-1:]
    return "; it said: ".join([*(line.removeprefix("graphmem: ") for line in ours), *own])


# --- the programs, and what becomes of them ---------------------------------------------------------------------------


def _estimate(line: Program | Sequence[str], family: Following, analyzed: dict[str, object]) -> Estimate:
    """The estimate of the process that holds the most, with the others beside it."""
    if isinstance(line, Program):
        with family.watched(os.getpid()):
            found, nothing = _of_program(line, analyzed)
        family.check()
        found += family.reports()
        if not found:
            assert nothing is not None
            raise nothing
        return found[0].estimate if len(found) == 1 else beside(found, found[0].estimate.details["program"])
    with sandbox.attempt(lambda: True) as happened:
        code = family.start(line)
        family.check()
        found = family.reports()
    ending = {"code": code, "words": f"the command ended with exit code {code}", "how": "command", "error": ""}
    if not found:
        raise SourceError(f"{shlex.join(line)}: {ending['words']}, and no Python process of it put anything on the GPU")
    estimate = beside(found, ending)
    return estimate.with_details(sandbox=happened) if happened else estimate


def _of_program(program: Program, analyzed: dict[str, Any]) -> tuple[list[Reported], NothingOnDevice | None]:
    """The program's own process: of one that runs itself for many settings, each of them."""
    from graphmem.analyze import analyze

    words = program.words
    try:
        found = [Reported(words, analyze(program, **analyzed))]
    except NothingOnDevice as error:
        return [], error
    jobs = found[0].estimate.details["program"]["jobs"]
    for number in range(1, len(jobs)):
        found.append(Reported(words, analyze(replace(program, job=number), **analyzed)))
    return [replace(one, words=f"{words}: {jobs[at]}") if jobs else one for at, one in enumerate(found)], None


def _run_for_parent(program: Program, analyzed: dict[str, object], allowed: Allowed) -> NoReturn:
    """Analyse this process for the one that follows it, and end as the program would. Its output is its own."""
    told = children.told()
    with sandbox.joined(told["worker"]), launchers.replaced_agent(), _told_environment(None, allowed):
        try:
            found, nothing = _of_program(program, analyzed)
        except GraphmemError as error:
            children.note("refused", f"{program.name}: {error}")
            raise
    for one in found:
        hand_over(one)
    endings = [one.estimate.details["program"] for one in found]
    failed = {one["code"]: f"{program.name}: {one['words']}" for one in endings if one["code"]}
    if nothing is not None and nothing.code:
        failed[nothing.code] = str(nothing)
    for words in failed.values():
        click.echo(f"graphmem: {words}", err=True)
    click.get_current_context().exit(max(failed, default=0))


@contextlib.contextmanager
def _flying(allowed: Allowed) -> Iterator[None]:
    """The sandbox, with the rights that are allowed."""
    permissions = sandbox.Permissions(
        tuple(sandbox.folder_of(one) for one in allowed.writes if one),
        everywhere="" in allowed.writes,
        network=allowed.network,
        processes=allowed.processes,
    )
    own_process = click.get_current_context().find_root().obj is OWN_PROCESS
    with sandbox.entered(permissions, own_process=own_process):
        yield


@contextlib.contextmanager
def _following(launcher: Launcher, card: Device | None) -> Iterator[Following]:
    options = click.get_current_context().meta[_OWN_WORDS]
    with following(options, launcher.rank or 0, sandbox.worker(), card) as family, launchers.replaced_agent():
        yield family


def _step(followed: Followed, launcher: Launcher, started: Processes | None, is_program: bool) -> Training:
    """The step: values that are known, and the process that is analysed. Raises :class:`UsageError`."""
    step = Training(
        data_dependent=followed.data_dependent, assume=followed.assume, host_values_mb=followed.host_values_mb
    )
    rank = launcher.rank
    if started is None:
        if is_program and not children.is_followed() and (rank is not None or launcher.ranks is not None):
            raise UsageError("--rank and --ranks need --nproc-per-node, or --config")
        return step
    if rank is not None and launcher.node_rank is not None:
        raise UsageError("--rank says which process of all is analysed; leave out --node-rank, or --rank")
    rank = started.rank if rank is None else rank
    return replace(step, world_size=started.world_size, rank=rank, nproc_per_node=started.per_node)


def _told_environment(cards: int | None, allowed: Allowed) -> contextlib.AbstractContextManager[None]:
    """The environment while programs run: the cards, and that there is no network."""
    values = {} if allowed.network else {"HF_HUB_OFFLINE": "1"}
    if cards is not None:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(cards)))
    return changed(values)


@contextlib.contextmanager
def _silenced(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, having(sys, stdout=nowhere, stderr=nowhere):
        yield
