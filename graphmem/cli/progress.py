"""What is being done, on stderr where that is a terminal: a line while one waits, and a bar where answers are many."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from graphmem.reports.document import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task

#: Seconds of silence before the progress line appears, and between lines where there is no terminal.
PATIENCE, _SILENCE = 0.5, 30.0


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


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on a terminal, shown after some time; yields the function that sets its words, and counts
    (:func:`graphmem.answering.runs.counted`). Elsewhere the words are printed twice a minute."""
    if not sys.stderr.isatty():
        yield _seldom()
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}")  # a narrow terminal cuts it
    line = Progress(SpinnerColumn(), TimeElapsedColumn(), *_counting(), words, console=stderr_console(), transient=True)
    timer = threading.Timer(PATIENCE, line.start)
    timer.daemon = True
    timer.start()
    try:
        yield _Line(line)
    finally:
        timer.cancel()
        timer.join()
        line.stop()


class _Line:
    """The words of a progress line, and how many of how many are done."""

    def __init__(self, line: Progress) -> None:
        self._line, self._task = line, line.add_task("analysing", total=None)

    def __call__(self, stage: str) -> None:
        self._line.update(self._task, description=clean(stage))

    def count(self, done: int, total: int) -> None:
        """So many answers of so many are there."""
        self._line.update(self._task, completed=done, total=total)


def _seldom() -> Callable[[str], None]:
    last = time.monotonic()

    def say(stage: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SILENCE:
            last = time.monotonic()
            print(clean(stage), file=sys.stderr, flush=True)

    return say


def _counting() -> tuple[ProgressColumn, ...]:
    """Columns that are empty while nothing is counted: a bar, how many of how many, how fast, and what is left."""
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TimeRemainingColumn
    from rich.text import Text

    class Counted(ProgressColumn):
        def __init__(self, shown: Callable[[Task], Any]) -> None:
            super().__init__()
            self._shown = shown

        def render(self, task: Task) -> Any:
            return Text("") if task.total is None else self._shown(task)

    parts = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    bar, number, left = (Counted(part.render) for part in parts)
    return bar, number, Counted(lambda task: Text(rate_words(task.speed))), left


def rate_words(speed: float | None) -> str:
    """How fast answers come, given how many a second: as many a second, or seconds each."""
    if not speed:
        return ""
    return f"{speed:.0f}/s" if speed >= 1 else f"{1 / speed:.0f} s each"
