"""Where results go: stdout, or a file that is written whole or not at all; and the progress line on stderr."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from graphmem.base.files import write_whole
from graphmem.cli.endings import OWN_PROCESS
from graphmem.cli.fields import NO_CACHE
from graphmem.cli.options import Output
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.reports import Answer, Format
from graphmem.reports.document import Document, clean
from graphmem.reports.formats.text import MINIMUM_WIDTH
from graphmem.units import format_bytes

DOES_NOT_FIT = 3

#: Seconds of silence before the progress line appears.
PATIENCE = 1.0
_WIDEST = 120
_LIBRARIES = (
    "torch",
    "transformers",
    "timm",
    "torchvision",
    "keras",
    "tensorflow",
    "onnx",
    "onnxruntime",
    "accelerate",
)


def show(estimate: Estimate, options: Output) -> None:
    """Render and emit; then exit with 3 when ``--fail-on-oom`` or ``--budget`` asks for it. Raises
    :class:`UsageError`."""
    chosen = {"top": options.top, "budget_bytes": options.budget_bytes}
    publish(estimate, options.form, options.output, details=options.details, **chosen)
    budget = options.budget_bytes
    if budget is not None and estimate.device > budget:
        over, allowed = format_bytes(estimate.device - budget), format_bytes(budget)
        click.echo(f"graphmem: over the budget of {allowed} by {over} of device memory", err=True)
        click.get_current_context().exit(DOES_NOT_FIT)
    if options.fail_on_oom and estimate.fit is not None and not estimate.fit.passes:
        click.get_current_context().exit(DOES_NOT_FIT)


def publish(
    answer: Answer | Document, form: Format, output: str | None, *, details: bool = False, **chosen: Any
) -> None:
    """Write an answer, or its document, in a format to stdout or to a file; ``chosen``: further arguments of the
    answer's document. Raises :class:`UsageError`."""
    whole = details or form.has_room
    document = answer if isinstance(answer, Document) else answer.document(details=whole, **chosen)
    emit(form.render(document, width(output)), output)


def emit(content: str | bytes, output: str | None) -> None:
    """Write to stdout, or to the file and say so on stderr. Raises :class:`UsageError` when that fails."""
    if output in (None, "-"):
        _to_stdout(content)
        return
    assert output is not None
    write_whole(Path(output), content)
    click.echo(f"wrote {output}", err=True)


def _to_stdout(content: str | bytes) -> None:
    if sys.stdout is None:
        raise UsageError("standard output is closed; name a file with -o FILE")
    if isinstance(content, str):  # names from files may hold what no encoding has
        content = content.encode("utf-8", "backslashreplace").decode("utf-8")
    try:
        click.echo(content, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough
        raise
    except OSError as error:
        raise UsageError(f"cannot write to standard output: {error.strerror or error}") from None


def check_output(output: str | None) -> None:
    """Refuse a file that cannot be written before any work is done. Raises :class:`UsageError`."""
    if output in (None, "-"):
        return
    assert output is not None
    if "\0" in output or not output:
        raise UsageError(f"cannot write {output!r}: not the name of a file")
    path = Path(output)
    try:
        if path.is_dir():
            raise UsageError(f"cannot write {output}: it is a directory")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"cannot write {output}: there is no directory {path.absolute().parent}")
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None


def width(output: str | None) -> int | None:
    """Columns of the output: the terminal's; None for files and pipes."""
    if output not in (None, "-") or sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(MINIMUM_WIDTH, min(shutil.get_terminal_size().columns, _WIDEST))


@contextlib.contextmanager
def working(*, shows_warnings: bool = False) -> Iterator[Callable[[str], None]]:
    """While it lasts, what the model's own code prints goes to stderr, and a progress line with the iteration, the
    operators and the time shows there on a terminal after a second. Warnings of libraries are about their use by
    graphmem and not shown, unless a program runs as it is. Captures are kept on the disk, and recalled from there.
    Yields a function for the words of the progress line."""
    _use_process(click.get_current_context(silent=True))
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), _status() as say:
        if not shows_warnings:
            warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})(\.|$)")
        yield say


def _use_process(context: click.Context | None) -> None:
    """Where this process is our own, let imports wait, and keep captures on the disk unless somebody said otherwise."""
    if context is None or context.obj is not OWN_PROCESS:
        return
    from graphmem.answering import capture_cache, waiting

    waiting.is_own_process = True
    if context.meta.get(NO_CACHE):
        return
    capture_cache.use(capture_cache.default_folder())


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, shown after some time; yields the function that sets its text."""
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from graphmem.cli.progress import stderr_console

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))  # a narrow one cuts words
    status = Progress(*columns, console=stderr_console(), transient=True)
    task = status.add_task("analysing")
    timer = threading.Timer(PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda stage: status.update(task, description=clean(stage))
    finally:
        timer.cancel()
        timer.join()
        status.stop()
