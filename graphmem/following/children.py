"""In a followed process: what becomes of it. It is imported in each, so it imports little."""

from __future__ import annotations

import builtins
import json
import os
import sys

from graphmem.base.rewritten import AS_WRITTEN
from graphmem.following.words import WORKERS, PythonLine, launched_options, rank_of

TYPE_CHECKING = False  # that of ``typing``, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, NoReturn

#: The environment variable with what a process has to know, as JSON.
VARIABLE = "GRAPHMEM_FOLLOW"
#: That of the process that became ``graphmem run``: its number.
CAPTURED = "GRAPHMEM_CAPTURED"
_START = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli", "start_followed.py")


class Notes:
    """Notes that processes leave in a folder for the one that follows them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, kind: str, text: str = "") -> None:
        """Note it for this process."""
        place = os.path.join(self._folder, kind)
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, str(os.getpid())), "w", encoding="utf-8") as file:
            file.write(text)

    def has(self, kind: str, process: int) -> bool:
        """True if the process has left such a note."""
        return os.path.exists(os.path.join(self._folder, kind, str(process)))

    def all_of(self, kind: str) -> list[str]:
        """The texts of one kind."""
        place, texts = os.path.join(self._folder, kind), []
        for name in sorted(os.listdir(place)) if os.path.isdir(place) else ():
            with open(os.path.join(place, name), encoding="utf-8") as file:
                texts.append(file.read())
        return texts


def is_followed() -> bool:
    """True in a process that became ``graphmem run`` to be followed."""
    return os.environ.get(CAPTURED) == str(os.getpid())


def told() -> dict[str, Any]:
    """The values that this process was given (:func:`graphmem.following.following`)."""
    found: dict[str, Any] = json.loads(os.environ[VARIABLE])
    return found


def note(kind: str, text: str = "") -> None:
    """Leave a note for the process that follows this one."""
    Notes(told()["folder"]).write(kind, text)


def begin() -> None:
    """Decide what becomes of this process; called before its first line."""
    note("seen")
    vars(builtins).update(AS_WRITTEN)  # functions of the program may be sent here by their code (joblib, cloudpickle)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: note("seen"))
    if not is_followed():
        _children.append(_Child(told(), PythonLine(sys.orig_argv)))
        _children[0].begin()


_children: list[_Child] = []


class _Child:
    def __init__(self, told: dict[str, Any], line: PythonLine) -> None:
        self._told, self._line, self._process = told, line, os.getpid()

    def begin(self) -> None:
        """End, become ``graphmem run``, or wait for the import of PyTorch."""
        if self._line.kind in ("file", "module") and rank_of(os.environ) not in (None, self._told["rank"]):
            sys.stdout.flush()
            os._exit(0)
        if self._line.kind == "code" and self._line.target == "-":  # Python would read it all before it runs
            os.execv(sys.executable, [sys.executable, *self._line.flags, "-c", sys.stdin.read(), *self._line.arguments])
        if self._line.is_server:
            self._capture()
        if self._told["worker"] is not None:
            from graphmem.sandbox.processes import begin_worker

            begin_worker(*self._told["worker"])
        from graphmem.base.imports import watched_imports
        from graphmem.following.launchers import IMPORTS

        self._watching = watched_imports({"torch": self._torch, **IMPORTS})
        self._watching.__enter__()  # until the process ends

    def _torch(self, torch: ModuleType, run: Callable[[], None]) -> None:
        if self._can_begin_again and not self._line.is_launcher:
            self._capture()
        run()
        from graphmem.following.launchers import show_cards
        from graphmem.training.processes import visible_cards

        told = "CUDA_VISIBLE_DEVICES" in os.environ or not self._line.is_launcher
        show_cards(torch, visible_cards(os.environ) if told else self._line.cards, self._touched)

    @property
    def _can_begin_again(self) -> bool:
        return os.getpid() == self._process and not self._line.worker and self._line.kind != "none"

    def _touched(self) -> NoReturn:
        """PyTorch starts its work on the card."""
        if self._line.is_launcher:
            refuse(f"{self._line.name} uses the card itself; write graphmem run before the program that it starts")
        if self._can_begin_again:
            self._capture()
        name = "of multiprocessing" if self._line.kind != "file" else self._line.name
        advice = self._line.worker or WORKERS["multiprocessing"]
        refuse(f"a worker process {name} uses the card, and cannot be followed; {advice}")

    def _capture(self) -> NoReturn:
        """Begin again as ``graphmem run``."""
        line = self._line
        options = [*self._told["options"], *launched_options(os.environ)]
        words = {"module": ["-m", line.target], "code": ["-c", line.target]}.get(line.kind, ["--", line.target])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.environ[CAPTURED] = str(os.getpid())
        os.execv(sys.executable, [sys.executable, *line.flags, _START, "run", *options, *words, *line.arguments])


def refuse(message: str) -> NoReturn:
    """End this process with exit code 1; ``message`` goes into the notes and to stderr."""
    note("refused", message)
    sys.stderr.write(f"graphmem: {message}\n")
    sys.stderr.flush()
    os._exit(1)
