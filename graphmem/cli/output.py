"""Where results go: stdout, or a file that is written whole or not at all; and the progress line on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphmem.base.files import write_whole
from graphmem.cli.endings import OWN_PROCESS
from graphmem.cli.fields import NO_CACHE
from graphmem.cli.options import Output
from graphmem.cli.progress import status
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.reports import Answer, Format, format_named
from graphmem.reports.document import Document
from graphmem.reports.formats.text import FORMAT, MINIMUM_WIDTH, TERMINAL
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.planning.largest import Largest

DOES_NOT_FIT = 3

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


def makes_page(options: Output) -> bool:
    """Whether a page for a browser is asked for."""
    return bool(options.html or options.opens or options.form.name == "html")


def show(estimate: Estimate, options: Output, page: Document | None = None) -> None:
    """Render and emit; a ``page`` is what a browser is shown instead of the estimate's own. Then exit with 3 when
    ``--fail-on-oom`` or ``--budget`` asks for it, and with 1 for a step that fails all the same. Raises
    :class:`UsageError`."""
    budget = options.budget_bytes
    shown = page if page is not None and options.form.name == "html" else estimate
    publish(shown, options.form, options.output, details=options.details, tree=options.tree, budget_bytes=budget)
    if options.html or options.opens:
        _page(page or estimate, options, budget_bytes=budget)
    if budget is not None and estimate.device > budget:
        over, allowed = format_bytes(estimate.device - budget), format_bytes(budget)
        card = f" on {estimate.gpu}, as no --gpu was given" if estimate.card_assumed else ""
        click.echo(f"graphmem: over the budget of {allowed} by {over} of device memory{card}", err=True)
        click.get_current_context().exit(DOES_NOT_FIT)
    if options.fail_on_oom and (estimate.failure or (estimate.fit is not None and not estimate.fit.passes)):
        click.get_current_context().exit(DOES_NOT_FIT)
    if estimate.failure:
        click.echo(f"graphmem: the step fails on any card: {estimate.failure}", err=True)
        click.get_current_context().exit(1)


def show_largest(found: Largest, form: Format, output: str | None, *, margin: str | None) -> None:
    """Render and emit; then exit with 3 where no size fits, or none is safe at the ``margin`` asked for."""
    publish(found, form, output)
    if not (found.value if margin is None else found.safe_value):
        click.get_current_context().exit(DOES_NOT_FIT)


def _page(estimate: Estimate | Document, options: Output, **chosen: Any) -> None:
    """Write the whole report as a page, and show it where that is asked for. Raises :class:`UsageError`."""
    name = options.html
    if name is None:
        descriptor, name = tempfile.mkstemp(prefix="graphmem-", suffix=".html")
        os.close(descriptor)
    publish(estimate, format_named("html"), name, **chosen)
    if options.opens and not webbrowser.open(Path(name).absolute().as_uri()):
        click.echo(f"graphmem: no browser was found to show {name}", err=True)


def publish(
    answer: Answer | Document, form: Format, output: str | None, *, details: bool = False, **chosen: Any
) -> None:
    """Write an answer, or its document, in a format to stdout or to a file; ``chosen``: further arguments of the
    answer's document. Raises :class:`UsageError`."""
    whole = details or form.has_room
    document = answer if isinstance(answer, Document) else answer.document(details=whole, **chosen)
    columns = width(output)
    shown = TERMINAL if form is FORMAT and columns is not None and _shows_colours() else form
    emit(shown.render(document, columns), output)


def _shows_colours() -> bool:
    """Whether standard output is a terminal that shows colours and blocks, and nobody asked for none (no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


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


def check_output(*outputs: str | None) -> None:
    """Refuse files that cannot be written before any work is done. Raises :class:`UsageError`."""
    for output in outputs:
        if output is not None and output != "-":
            _check_file(output)


def _check_file(output: str) -> None:
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
    """Columns of the output: the terminal's, or of a pipe those that ``COLUMNS`` says; None for files, and for pipes of
    which nothing is said."""
    if output not in (None, "-") or sys.stdout is None:
        return None
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return max(MINIMUM_WIDTH, min(shutil.get_terminal_size().columns, _WIDEST))


@contextlib.contextmanager
def working(*, shows_warnings: bool = False) -> Iterator[Callable[[str], None]]:
    """While it lasts, what the model's own code prints goes to stderr, and a progress line with what is being done, the
    time, and of many answers how many are left shows there on a terminal after half a second. Warnings of libraries are
    about their use by graphmem and not shown, unless a program runs as it is. Captures are kept on the disk, and
    recalled from there. Yields a function for the words of the progress line."""
    _use_process(click.get_current_context(silent=True))
    quiet = contextlib.nullcontext() if shows_warnings else _without_warnings()
    with contextlib.redirect_stdout(sys.stderr), quiet, status() as say:
        yield say


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Libraries warn through ``warnings``, and through ``logging``, whose levels they set anew when they are imported:
    of those that are errors alone are heard."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})(\.|$)")
            yield
    finally:
        logging.disable(before)


def _use_process(context: click.Context | None) -> None:
    """Where this process is our own, let imports wait, and keep captures on the disk unless somebody said otherwise."""
    if context is None or context.obj is not OWN_PROCESS:
        return
    from graphmem.answering import capture_cache, waiting

    waiting.is_own_process = True
    if context.meta.get(NO_CACHE):
        return
    capture_cache.use(capture_cache.default_folder())
