"""Python processes below a program or a command: each is noticed, and analysed where it uses the card.

Every Python process runs ``hook/sitecustomize.py``, which lies first on ``PYTHONPATH``; nothing is written into an
environment of the user's. In the process (:mod:`graphmem.following.children`):

- one that never imports PyTorch runs as it is;
- a launcher (``torchrun``, ``accelerate launch``, ``deepspeed``) runs as it is, finds the cards that it asks for, and
  starts one process in place of all (:mod:`graphmem.following.launchers`);
- every other one becomes ``graphmem run`` of its own command line where it imports PyTorch;
- another rank than the one that is analysed ends at once;
- a worker of ``multiprocessing`` runs as it is, and is refused the card by name: it cannot begin again.

A process without the hook (``python -I``, ``-E``, ``-S``, an environment made anew) is found by its libraries and
ended (:mod:`graphmem.following.unnoticed`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmem.base.environment import changed
from graphmem.devices import DEFAULT_DEVICE, Device, device_named
from graphmem.errors import CaptureError, UsageError
from graphmem.estimate import Estimate
from graphmem.following import children, handed
from graphmem.following.children import VARIABLE, Notes
from graphmem.following.unnoticed import watched_for_unnoticed

_HOOK = Path(__file__).parent / "hook"
_PATH = "PYTHONPATH"
#: Packages of ours that a process of another environment borrows; all are Python alone.
_BORROWED = ("graphmem", "click", "rich", "markdown_it", "mdurl", "pygments")


@dataclass(frozen=True)
class Reported:
    """A process that was analysed: its command line, and its estimate."""

    words: str
    estimate: Estimate

    def row(self) -> dict[str, Any]:
        """The process as a part of ``details["followed"]``."""
        program = self.estimate.details["program"]
        return {"words": self.words, "ending": program["words"], "code": program["code"], **levels_of(self.estimate)}


def levels_of(estimate: Estimate) -> dict[str, int]:
    """The four levels of the peak in bytes."""
    return {f"{name}_bytes": getattr(estimate, name) for name in ("requested", "allocated", "reserved", "device")}


@dataclass(frozen=True)
class Following:
    """The processes below this one. ``folder`` holds the notes and reports of each."""

    folder: str

    def start(self, words: Sequence[str]) -> int:
        """Run a command to its end; its exit code, that of a shell where a signal ended it.

        Raises :class:`UsageError` where it cannot be started, :class:`CaptureError` where a process of it uses
        PyTorch unseen.
        """
        environment, words = _assigned(words)
        try:
            process = subprocess.Popen(_started(words), env=environment, stdout=sys.stderr)
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror or error}") from None
        with _passed_on(process), self.watched(process.pid):
            code = process.wait()
        return code if code >= 0 else 128 - code

    def watched(self, root: int) -> contextlib.AbstractContextManager[None]:
        """While it lasts, processes below ``root`` that use PyTorch unseen end the run with a :class:`CaptureError`."""
        return watched_for_unnoticed(root, Notes(self.folder))

    def check(self) -> None:
        """Raises :class:`CaptureError` where a process used the card and could not be followed."""
        refused = Notes(self.folder).all_of("refused")
        if refused:
            raise CaptureError(refused[0])

    def reports(self) -> list[Reported]:
        """The processes that were analysed, in the order in which they ended."""
        files = sorted(Path(self.folder, "reports").glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
        return [Reported(words, handed.read(text)) for words, text in (json.loads(one.read_text()) for one in files)]


@contextlib.contextmanager
def following(
    options: Sequence[str], rank: int, worker: Sequence[object] | None, card: Device | None = None
) -> Iterator[Following]:
    """Until the end, Python processes that this one starts are followed.

    ``options``: of ``graphmem run``, for each that is analysed; ``rank``: the one of several that is; ``card``: the one
    that launchers find; ``worker``: arguments of :func:`graphmem.sandbox.processes.begin_worker` where processes have
    to enter the sandbox themselves.
    """
    folder = tempfile.mkdtemp(prefix="graphmem-follow-")
    told = {
        "folder": folder, "options": list(options), "rank": rank, "worker": worker,
        "packages": _borrowed(), "card": _properties(card or device_named(DEFAULT_DEVICE)),
    }  # fmt: skip
    values = {
        VARIABLE: json.dumps(told),
        _PATH: os.pathsep.join(filter(None, (str(_HOOK), os.environ.get(_PATH)))),
        "PATH": os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent)))),
    }
    try:
        with changed(values):
            yield Following(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hand_over(one: Reported) -> None:
    """Give the estimate of this process to the one that follows it."""
    folder = Path(children.told()["folder"], "reports")
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{os.getpid()}-*")))
    (folder / f"{os.getpid()}-{number}.json").write_text(json.dumps([one.words, handed.written(one.estimate)]))


def beside(reports: Sequence[Reported], ending: Mapping[str, Any]) -> Estimate:
    """The estimate of the process that holds the most of the card, with the figures of the others beside it.
    ``ending``: of the program or the command as a whole."""
    rows = [one.row() for one in reports]
    most = max(range(len(rows)), key=lambda at: tuple(reversed(levels_of(reports[at].estimate).values())))
    estimate, followed = reports[most].estimate, {"fullest": most, "processes": rows}
    return estimate.with_details(followed=followed, program=dict(ending))


def _properties(card: Device) -> dict[str, object]:
    """What ``torch.cuda.get_device_properties`` says of a card."""
    major, minor = card.capability
    return {
        "name": card.name, "major": major, "minor": minor, "total_memory": card.capacity_bytes,
        "multi_processor_count": card.sm_count,
    }  # fmt: skip


def _borrowed() -> dict[str, str]:
    """Package -> the folder that it lies in."""
    from importlib.util import find_spec

    specs = {name: find_spec(name) for name in _BORROWED}
    return {name: str(Path(one.origin).parents[1]) for name, one in specs.items() if one is not None and one.origin}


def _assigned(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The environment with ``NAME=value`` in front of a command, and the command."""
    environment, rest = dict(os.environ), list(words)
    while rest and rest[0].partition("=")[0].isidentifier() and "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        environment[name] = value
    if not rest:
        raise UsageError("no command given after the variables")
    return environment, rest


def _started(words: Sequence[str]) -> list[str]:
    """The command line with the program found: of shell scripts that are not executable, the shell is."""
    path = Path(words[0])
    if path.suffix == ".sh" and path.is_file():
        return ["bash", *words]
    found = shutil.which(words[0])
    if found is None and path.is_file():
        raise UsageError(
            f"{words[0]} is a file that is not run by itself; write the command that takes it (python {words[0]}), or "
            f"for a configuration graphmem analyze {words[0]}"
        )
    if found is None:
        raise UsageError(
            f"{words[0]} is neither a file nor a command on PATH; write graphmem run train.py, graphmem run -m "
            "package.module, or any command line that starts Python"
        )
    return [found, *words[1:]]


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal that ends this process ends the command first."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        raise
