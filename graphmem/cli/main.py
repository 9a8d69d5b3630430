"""The group of commands, and the one place where errors become a line on stderr and an exit code.

Exit codes: 0 done, 1 an error of ours or of the input, 2 wrong usage of options, 3 does not fit (with
``--fail-on-oom``).
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click

from graphmem.cli.accuracy import accuracy_command
from graphmem.cli.advise import advise_command
from graphmem.cli.analyze import analyze_command
from graphmem.cli.calibrate import calibrate_command
from graphmem.cli.compare import compare_command
from graphmem.cli.export_trace import export_trace_command
from graphmem.cli.fit import fit_command
from graphmem.cli.gpus import gpus_command
from graphmem.cli.measure import measure_command
from graphmem.cli.replay import replay_command
from graphmem.cli.sweep import sweep_command
from graphmem.cli.verify import verify_command
from graphmem.cli.zoo import zoo_command
from graphmem.errors import GraphmemError
from graphmem.reports import text

_DEBUG = "GRAPHMEM_DEBUG"
_BUG = f"this is a bug in graphmem, please report it; set {_DEBUG}=1 for the traceback"


class Commands(click.Group):
    """A group whose commands never show a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except (Exception, SystemExit) as error:
            if os.environ.get(_DEBUG):
                traceback.print_exc()
            line = text.clean(" ".join(_message(error).split()))
        click.echo(f"graphmem: {line}", err=True)
        ctx.exit(1)


def _message(error: BaseException) -> str:
    """What to tell: our errors explain themselves, the rest is named."""
    if isinstance(error, GraphmemError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the code of the model ended the program itself (exit code {error.code})"
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for the analysis"
    return f"{type(error).__name__}: {error}: {_BUG}"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="graphmem")
def cli() -> None:
    """Predict, without a GPU, how much GPU memory a deep-learning model will need."""


cli.add_command(analyze_command)
cli.add_command(fit_command)
cli.add_command(advise_command)
cli.add_command(sweep_command)
cli.add_command(compare_command)
cli.add_command(replay_command)
cli.add_command(export_trace_command)
cli.add_command(gpus_command)
cli.add_command(zoo_command)
cli.add_command(measure_command)
cli.add_command(verify_command)
cli.add_command(calibrate_command)
cli.add_command(accuracy_command)


def main() -> None:
    """Entry point of the ``graphmem`` program and of ``python -m graphmem``."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    cli(prog_name="graphmem")
