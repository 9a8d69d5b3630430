"""The group of commands, and the one place where errors become a line on stderr and an exit code.

Exit codes: 0 done, 1 an error of ours or of the input, a wrong value among them, 2 options that cannot be read, 3 does
not fit (with ``--fail-on-oom``), 130 and 143 for Ctrl-C and ``SIGTERM``.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import click

from graphmem.cli import elsewhere, once
from graphmem.cli.endings import ENDINGS, OWN_PROCESS, Terminated, ending_in_order
from graphmem.errors import GraphmemError, ShapeError, one_line
from graphmem.plugins import Kind
from graphmem.reports.document import clean

#: A shell's exit code of a program that Ctrl-C ended.
INTERRUPTED = 130
#: The errors of a disk, or of the user's share of one, that is full.
_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))

#: Those of a name that is too long, a circle of links, or a place where one may not look.
_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR)


_DEBUG = "GRAPHMEM_DEBUG"
_WORDS = "graphmem.words"  # where a click context keeps the words of the command line
_DEBUGGED = f"set {_DEBUG}=1 for the traceback"
_BUG = f"this is a bug in graphmem, please report it; {_DEBUGGED}"


#: What each command is for, in the help of all of them, which imports none.
_SHORT = {
    "analyze": "How much memory a model needs, and whether it fits.",
    "run": "A whole program as it is: what it would need on a card.",
    "fit": "The largest batch or sequence length that fits a card.",
    "advise": "What would save memory, each suggestion analysed.",
    "sweep": "Every combination of some settings.",
    "plan": "Which layout over several cards fits.",
    "pack": "Which jobs share which card.",
    "serve": "How many requests an inference engine holds at once.",
    "compare": "Two reports side by side, or a growth budget in CI.",
    "check": "What a project watches: budgets, cards, committed figures.",
    "replay": "A recorded run on another card or allocator setting.",
    "export": "A step for memory_viz, Perfetto, speedscope, as tables.",
    "gpus": "The known cards, each figure with its source.",
    "web": "An HTTP service and a page for a browser.",
    "schema": "The JSON Schema of an answer.",
    "doctor": "Which of the libraries are installed, known and missing.",
    "cache": "The captures that are kept on the disk.",
    "explain": "What is known of an operator of PyTorch.",
    "zoo": "The models that come with graphmem.",
    "measure": "Run models on this machine's card and record peaks.",
    "verify": "Predict, run on this machine's card, and compare.",
    "calibrate": "Measure this machine's card once, for later estimates.",
    "accuracy": "Compare measurements with predictions; write the report.",
}
#: The commands, each in a module of its own, which is imported when it is called; those of a
#: room that can be taken away are there with it.
COMMANDS: Kind[click.Command] = Kind(
    "command", "graphmem.commands", package="graphmem.cli", attribute="{}_command",
    order=tuple(_SHORT),
    needs={"plan": "graphmem.planning.layouts", "pack": "graphmem.planning.layouts", "serve": "graphmem.serving",
           **dict.fromkeys(("measure", "verify", "calibrate", "accuracy"), "graphmem.accuracy")},
)  # fmt: skip


#: Former names of commands, which stay.
_FORMER = {"export-trace": "export"}


class _ByName(Mapping[str, click.Command]):
    """The commands by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        name = _FORMER.get(name, name)
        if name not in COMMANDS.own() and name not in COMMANDS.names():
            raise KeyError(name)
        command = COMMANDS.named(name)
        command.short_help = _SHORT.get(name, command.short_help)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS.names())

    def __len__(self) -> int:
        return len(COMMANDS.names())


def _about(command: click.Command, flag: str) -> str:
    """What an option is for, and all its values where a shell completes them."""
    context = click.Context(command, info_name=command.name)
    parameter = next(one for one in command.params if flag in one.opts)
    formatter = context.make_formatter()
    formatter.write_dl([found] if (found := parameter.get_help_record(context)) else [])
    values = [one.value for one in parameter.shell_complete(context, "") if one.value]
    if values:
        formatter.write_paragraph()
        formatter.write_text(f"All of them: {', '.join(values)}.")
    return formatter.getvalue()


class Commands(click.Group):
    """A group whose commands never show a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = tuple(args)  # before they are taken apart: an error may name the command that is answered
        if args[:1] == ["help"] and "help" not in self.commands:
            args = self._helped(ctx, args[1:])
        return super().parse_args(ctx, args)

    def _helped(self, ctx: click.Context, words: list[str]) -> list[str]:
        """The words that ``graphmem help WORDS`` stands for: a command's help, or its own where none is named. An
        option is answered at once, one of another tool too."""
        name = words[0] if words else ""
        if not name or name in self.commands:
            return [*words[:1], "--help"]
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        having = [one for one in self.commands if any(flag in p.opts for p in self.commands[one].params)]
        there = elsewhere.words_for(name)
        if having:
            click.echo(f"{flag} is an option of {', '.join(having)}: graphmem {having[0]} --help")
            click.echo(_about(self.commands[having[0]], flag), nl=False)
        elif there:
            click.echo(f"there is no {flag}; here: {there}")
        elif text := elsewhere.topic(name):
            click.echo(text)
        else:
            raise click.UsageError(f"no command and no option {name!r}; see graphmem --help", ctx)
        ctx.exit()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; an option that takes one value is given once."""
        name, command, words = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            once.check(click.Context(command, ctx, name, **command.context_settings), words)
        return name, command, words

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command is for; those of other packages say it themselves."""
        names = self.list_commands(ctx)
        rows = [(name, _SHORT.get(name) or self.commands[name].get_short_help_str()) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with ending_in_order():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (KeyboardInterrupt, Terminated) as error:
            line, code = "interrupted", error.code if isinstance(error, Terminated) else INTERRUPTED
        except (Exception, SystemExit) as error:
            if os.environ.get(_DEBUG):
                import traceback

                traceback.print_exc()
            line, code = clean(one_line(_message(error, ctx.meta.get(_WORDS, ())))), 1
        with contextlib.suppress(OSError):
            click.echo(f"graphmem: {line}", err=True)
        ctx.exit(code)


def _message(error: BaseException, words: Sequence[str] = ()) -> str:
    """The line that is printed: our errors explain themselves, the rest is named. ``words``: of the command line."""
    if isinstance(error, ShapeError) and error.options and words:
        return f"{error.reason}{error.lead}graphmem {shlex.join((*_without(words, error.dropped), *error.options))}"
    if isinstance(error, GraphmemError):
        return str(error)
    if isinstance(error, SystemExit):
        whole = next((word.rpartition(":")[0] for word in words if re.fullmatch(r".+\.py:\w+", word)), "")
        hint = f"; a whole program is followed by: graphmem run {whole}" if whole else ""
        return f"the code of the model ended the program itself (exit code {error.code}){hint}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("graphmem."):
        return f"this graphmem has no {error.name}, which that needs"
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for the analysis"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"cannot write: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _NAMES and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return _unexpected(error)


def _unexpected(error: BaseException) -> str:
    """An error of nobody's making: an unknown PyTorch is named where it may be the cause, in place of a bug."""
    from graphmem import plugins, torch_names
    from graphmem.base import versions

    text, installed = f"{type(error).__name__}: {error}", versions.installed()
    package = plugins.package_at_fault(error)
    if package is not None:
        return f"{text}: this comes from {package}, not from graphmem; {_DEBUGGED}"
    if torch_names.explained(error) is None and (installed is None or installed <= versions.NEWEST):
        return f"{text}: {_BUG}"
    return f"{torch_names.explained(error) or f'{versions.of_this_pytorch()}, which may be why: {text}'}; {_DEBUGGED}"


def _without(words: Sequence[str], dropped: Sequence[str]) -> Iterator[str]:
    """The words but the ``dropped`` options and their values."""
    spellings = {spelling for option in dropped for spelling in (option, *_SPELLINGS.get(option, ()))}
    is_value = False
    for word in words:
        is_dropped = word in spellings
        if not is_value and not is_dropped and word.partition("=")[0] not in spellings:
            yield word
        is_value = is_dropped


#: Other names of options that a message may leave out.
_SPELLINGS = {"--batch": ("-b", "--batch-size")}


@click.group(
    cls=Commands,
    commands=_ByName(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="graphmem")
def cli() -> None:
    """Predict, without a GPU, how much GPU memory a deep-learning model will need.

    'graphmem help NAME' is about a command or an option, one of another tool too (--lora, --precision).
    """


def main() -> None:
    """Run the command that ``sys.argv`` asks for."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:  # closed: what would be said there goes nowhere
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if "_GRAPHMEM_COMPLETE" in os.environ:
        _complete_in_bash()
    try:
        cli(prog_name="graphmem", obj=OWN_PROCESS)
    except OSError as error:  # of click's own output: the help, the version
        with contextlib.suppress(OSError):
            click.echo(f"graphmem: {_message(error)}", err=True)
        _leave(1)
    except SystemExit as error:
        if not isinstance(error.code, int):
            raise
        if error.code not in {128 + number for number in ENDINGS}:
            _end_as_python_does()
        _leave(error.code)


def _complete_in_bash() -> None:
    """Have click complete by our script in bash."""
    from click.shell_completion import add_completion_class

    from graphmem.cli.completion import Bash

    add_completion_class(Bash, "bash")


def _end_as_python_does() -> None:
    """Call what is to be called at exit: first what ends pools of workers (``Py_FinalizeEx``: ``threading._shutdown``),
    for which the rest waits. Threads themselves are not waited for."""
    calls: list[Callable[[], object]] = getattr(threading, "_threading_atexits", [])
    while calls:
        calls.pop()()
    atexit._run_exitfuncs()


def _leave(code: int) -> None:
    """End at once: a call into C++ that a signal interrupted may still run, and must not find its libraries gone; and
    to take a large program apart piece by piece is a tenth of the time of a short command."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
