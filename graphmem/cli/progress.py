"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def stderr_console() -> Console:
    """The terminal on stderr, in the size that Python finds: rich breaks on a ``COLUMNS`` that is no number."""
    from rich.console import Console

    width, height = shutil.get_terminal_size()
    return Console(stderr=True, width=width, height=height)


@contextlib.contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that moves the bar on by one and sets the words beside it; elsewhere it does nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(*columns, console=stderr_console()) as bar:
        task = bar.add_task(label, total=total, at="")
        yield lambda text: bar.update(task, advance=1, at=text)
