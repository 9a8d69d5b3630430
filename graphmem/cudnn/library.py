"""The user's cuDNN: where it is, and what it answers. A process of its own loads it (:mod:`graphmem.cudnn.worker`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from graphmem.base.records import dataclass
from graphmem.cudnn.card import check_supported, clocks_are_assumed, description
from graphmem.cudnn.plans import INSTANT, MODE_B, Convolution
from graphmem.cudnn.recurrent import Network
from graphmem.cudnn.worker import version_text
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import GraphmemError, UsageError

#: Words in place of a path: ask one if it is there, ask none, ask the one that is there.
AUTO, NEVER, INSTALLED = "auto", "never", "installed"
_NAME = "libcudnn.so.9"
_FOLDERS = (
    f"/usr/lib/{os.uname().machine}-linux-gnu" if hasattr(os, "uname") else "/usr/lib64",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
)
#: Seconds until a silent worker is given up. A plan takes milliseconds; the first also loads 300 MB of kernels.
_PATIENCE = 120.0
#: After so many ends of the worker it is not started again.
_MOST_STARTS = 3


#: The process that loads the library.
WORKER = (sys.executable, "-m", "graphmem.cudnn.worker")

#: A convolution with one list of the heuristics, or those of TensorFlow.
_Question = tuple[Convolution, int | None, tuple[int, ...]]


class CudnnUnavailable(GraphmemError):
    """The cuDNN that the user named cannot be found, loaded or asked; ``reason`` leaves out the option."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class CudnnAnswers:
    """What a :class:`Cudnn` has told, once it is closed."""

    remarks: list[str]
    without_plan: list[Diagnostic]
    findings: dict[str, Any]

    def notes(self) -> list[str]:
        """As of :class:`Cudnn`."""
        return self.remarks

    def refused(self) -> list[Diagnostic]:
        """As of :class:`Cudnn`."""
        return self.without_plan

    def details(self) -> dict[str, Any]:
        """As of :class:`Cudnn`."""
        return self.findings


def find_library(named: str | Path) -> str | None:
    """The library's path, or the name by which the loader knows it; None for ``never``, and for ``auto`` without one.

    ``installed`` is the ``nvidia-cudnn`` wheel of this Python's environment, else the loader's; a path is the file or
    a folder with it. Raises :class:`CudnnUnavailable`, and :class:`UsageError` for what is neither.
    """
    if named == NEVER or (named == AUTO and not sys.platform.startswith("linux")):
        return None
    if named == AUTO:
        return _wheel() or _known_to_loader()
    if not isinstance(named, (str, Path)) or not str(named):
        raise UsageError(
            f"cudnn is the path of {_NAME}, its folder, {AUTO!r}, {NEVER!r} or {INSTALLED!r}, not {named!r}"
        )
    if not sys.platform.startswith("linux"):
        raise CudnnUnavailable("--cudnn: cuDNN can be asked on Linux only; leave it out")
    if str(named) == INSTALLED:
        return _wheel() or _NAME
    path = Path(named).expanduser()
    if path.is_file():
        return str(path.resolve())
    folders = (path, path / "lib", path / "lib64", path / "nvidia" / "cudnn" / "lib")
    for folder in folders:
        if (folder / _NAME).is_file():
            return str((folder / _NAME).resolve())
    if path.is_dir():
        raise CudnnUnavailable(f"--cudnn: there is no {_NAME} in {named}, nor in its lib or lib64")
    raise CudnnUnavailable(f"--cudnn: there is no {named}; write the path of {_NAME}, its folder, or 'installed'")


def _wheel() -> str | None:
    return _first_file(tuple(sys.path), os.path.join("nvidia", "cudnn", "lib", _NAME))


def _known_to_loader() -> str | None:
    """Where packages of Linux distributions and CUDA's installer put it, and where the user's environment points to;
    the loader's own list can only be read by starting other programs."""
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_FOLDERS]
    return _first_file(tuple(filter(None, folders)), _NAME)


@cache
def _first_file(folders: tuple[str, ...], name: str) -> str | None:
    """Looked for once a process: every question asks."""
    return next((path for path in (os.path.join(folder, name) for folder in folders) if os.path.isfile(path)), None)


class Cudnn:
    """A cuDNN that plans for one card. Answers are kept, so each convolution and each network is asked once.

    Raises :class:`CudnnUnavailable` when the library cannot be loaded or is older than 9.8, :class:`UsageError` when it
    has no plans for the card. One that is found and not ``named`` (``auto``) is started by the first question, and
    :meth:`notes` give the reason where it could not be asked.
    """

    def __init__(self, named: str | Path, card: Device) -> None:
        self._named = named
        self._card = card
        self._library = find_library(named) or _NAME
        self._unusable = ""
        self._mode = MODE_B if os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1" else INSTANT
        self._answers: dict[_Question, list[int] | None] = {}
        self._reasons: dict[_Question, str] = {}
        self._spaces: dict[tuple[Network, bool], tuple[int, int] | None] = {}
        self._refused: Counter[str] = Counter()
        self._silent: Counter[str] = Counter()
        self._worker: subprocess.Popen[str] | None = None
        self._starts = 0
        self._about: dict[str, Any] = {}
        if named != AUTO:
            self._begin()

    def _begin(self) -> None:
        self._about = self._start()
        try:
            check_supported(self._card, self._about["cudart"])
        except UsageError:
            self.close()
            raise

    def __enter__(self) -> Cudnn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def workspaces(self, convolution: Convolution) -> tuple[int, ...] | None:
        """Bytes that the plan asks for which PyTorch takes without ``cudnn.benchmark``, then of those that it tries
        where there is too little memory, up to the first that needs none. None if there is no plan."""
        sizes = self._plans(convolution, self._mode)
        if not sizes:
            return None
        return tuple(sizes[: sizes.index(0) + 1] if 0 in sizes else sizes)

    def first_workspace(self, convolution: Convolution, mode: int) -> int | None:
        """Bytes of the first plan of one list of the heuristics; None if there is no plan."""
        sizes = self._plans(convolution, mode)
        return sizes[0] if sizes else None

    def largest_workspace(self, convolution: Convolution) -> int | None:
        """Bytes of the largest plan, which ``cudnn.benchmark`` takes to time them all; None if there is no plan."""
        found = self._plans(convolution, INSTANT)  # get_plans_from_find knows no other mode
        return max(found) if found else None

    def tried_out(self, convolution: Convolution, *, fused: bool = False) -> tuple[int, ...]:
        """Bytes of the plans in TensorFlow's list, in its order; none if there is no plan. It asks for the heuristics'
        plans in both modes, B first, and takes each once (``GetConvolveRunners``, cuda_dnn.cc); with a bias and an
        activation in the same graph mode B has none."""
        return tuple(self._plans(convolution, modes=(INSTANT,) if fused else (MODE_B, INSTANT)) or ())

    def recurrent_spaces(self, network: Network, training: bool) -> tuple[int, int] | None:
        """Bytes of work and reserve space of a recurrent network; None if the library gives none."""
        key = (network, training)
        if key not in self._spaces:
            answer = self._ask({"network": asdict(network), "training": training})
            self._spaces[key] = tuple(answer["spaces"]) if "spaces" in answer else None
            if "error" in answer and not self._unusable:
                self._silent[answer["error"]] += 1
        return self._spaces[key]

    @property
    def version(self) -> str:
        """For example ``9.20.0``."""
        return version_text(self._about["version"])

    def notes(self) -> list[str]:
        """Remarks on the answers: where they come from, and what was assumed."""
        if self._unusable:
            return [f"workspaces of convolutions and recurrent networks: predicted, for {self._unusable}"]
        if not self._about:
            return []  # nobody asked
        who = f"cuDNN {self.version} ({self._about['path']})"
        notes = [f"workspaces of convolutions and recurrent networks: asked from {who}"]
        if self._about["driver"] == "missing":
            notes.append("plans that cuDNN compiles at run time are left out: there is no CUDA driver on this machine")
        if clocks_are_assumed(self._card):
            notes.append(f"cuDNN's plans for {self._card.name} assume the clocks of an H200")
        return notes

    def refused(self) -> list[Diagnostic]:
        """Calls that took the built-in model's workspace because there was no plan, by cuDNN's reason."""
        by_code = ((Code.CUDNN_NO_PLAN, self._refused), (Code.CUDNN_NO_SPACES, self._silent))
        return [code.about(count=count, reason=why) for code, reasons in by_code for why, count in reasons.items()]

    def details(self) -> dict[str, Any]:
        """The findings for machines; empty where nobody asked."""
        if not self._about:
            return {"unusable": self._unusable} if self._unusable else {}
        planned = sum(answer is not None for answer in self._answers.values())
        return {
            "version": self.version,
            "library": self._about["path"],
            "driver": self._about["driver"],
            "plans_asked": len(self._answers),
            "plans_made": planned,
            "calls_without_a_plan": sum(self._refused.values()),
        }

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        assert worker.stdin is not None
        assert worker.stdout is not None
        with contextlib.suppress(OSError):  # it may have ended with a question unread
            worker.stdin.close()
        worker.stdout.close()
        try:
            worker.wait(timeout=10)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()

    def _plans(
        self, convolution: Convolution, mode: int | None = None, *, modes: tuple[int, ...] = ()
    ) -> list[int] | None:
        key = (convolution, mode, modes)
        if key not in self._answers:
            lists = {"modes": modes} if modes else {"mode": mode}
            answer = self._ask({**asdict(convolution), **lists})
            if self._unusable:
                return None
            self._answers[key] = answer.get("workspaces")
            if self._answers[key] is None:
                self._reasons[key] = answer["error"]
        found = self._answers[key]
        if found is None:
            self._refused[self._reasons[key]] += 1
        return found

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        """The worker's answer, or an error where it ended or stays silent."""
        if not self._about and not self._unusable:
            try:
                self._begin()
            except CudnnUnavailable as error:
                self._unusable = error.reason
            except UsageError as error:
                self._unusable = str(error)
        if self._unusable:
            return {"error": self._unusable}
        if self._worker is None and self._starts >= _MOST_STARTS:
            return {"error": f"its process ended {self._starts} times"}
        if self._worker is None:
            self._start()
        return self._exchange(question)

    def _start(self) -> dict[str, Any]:
        """Start the process that loads cuDNN; its first answer. Raises :class:`CudnnUnavailable`."""
        self._starts += 1
        site = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))}
        from graphmem.sandbox.guard import own

        with own():
            self._worker = subprocess.Popen(
                WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        search = [folder for folder in sys.path if folder and (Path(folder) / "nvidia").is_dir()]
        about = self._exchange({"library": self._library, "device": description(self._card), "search": search})
        if "error" in about:
            self.close()
            wheel = "; this environment has no nvidia-cudnn wheel" if self._library == _NAME else ""
            reason = f"{self._library} cannot be asked: {about['error']}{wheel}"
            raise CudnnUnavailable(f"--cudnn {self._named}: {reason}", reason)
        return about

    def _exchange(self, line: dict[str, object]) -> dict[str, Any]:
        """Send a line to the process and read its answer. One that is silent is killed; one that has ended is closed,
        and the answer is an ``error``."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        answer, silent = "", False
        try:
            worker.stdin.write(json.dumps(line) + "\n")
            worker.stdin.flush()
            silent = not select.select([worker.stdout], [], [], _PATIENCE)[0]
            answer = "" if silent else worker.stdout.readline()
        except BrokenPipeError:
            pass
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        if silent:
            worker.kill()
        code = worker.wait()
        self.close()
        return {"error": "its process did not answer" if silent else f"its process ended with exit status {code}"}
