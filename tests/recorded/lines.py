"""Command lines of training tools (``cases/lines/NAME``), recorded as their users type them and predicted by
``graphmem run`` before the same line; docs/LINES.md has the table.

A case is a folder with ``case.json`` (:class:`Line`) and the files that it needs; ``prepare.py``, if there, makes more.
Every Python process below the command notes its peaks when it ends; the recording is of the fullest. Both ways run in
an environment with the tools: ``GRAPHMEM_CUDA_PYTHON``, and what PYTHONPATH adds. What compiles is recorded in its
second run, without true values (:mod:`tests.recorded.whole`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import places
from tests.recorded import stub

FOLDER = places.ROOT / "tests" / "recorded" / "cases" / "lines"
GOLDEN = places.PYTORCH / "lines.json"
HOOK = places.ROOT / "tests" / "recorded" / "line_hook"
_CARD = "H200-141GB"


@dataclass(frozen=True)
class Line:
    """A case: a command ``line``, the ``packages`` by whose versions its figures are, how many ``cards`` it finds, and
    whether it ``compiles``."""

    name: str
    line: str
    packages: Sequence[str]
    cards: int = 1
    compiles: bool = False

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    def record(self) -> dict[str, Any]:
        """The notes of its fullest process on the stub. Raises :class:`SystemExit` where none used a card."""
        with tempfile.TemporaryDirectory() as caches:
            kept = {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": caches, "GRAPHMEM_LINE_COMPILES": "1"}
            if self.compiles:
                self._run(kept)
            return self._run(kept if self.compiles else {})

    def _run(self, more: Mapping[str, str]) -> dict[str, Any]:
        with self._place() as place, tempfile.TemporaryDirectory() as notes:
            told = {
                "GRAPHMEM_LINE_NOTES": notes, "GRAPHMEM_LINE_CARDS": str(self.cards),
                "TRUE_VALUES_SELECT": "all", "FAKE_CUDA_SENT": "1",
            }  # fmt: skip
            environment = stub.environment({**stub.REAL_CUDNN, **told, **more, **_search((HOOK, places.ROOT))})
            code = subprocess.run(["env", *self.words], cwd=place, env=environment, check=False).returncode
            found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(notes).glob("*.json")]
        if not found:
            raise SystemExit(f"{self.name}: no process of the line used the card; it ended with exit code {code}")
        return max(found, key=lambda one: one["reserved"]) | {"exit_code": code}

    def predict(self, options: list[str]) -> tuple[int, int]:
        """Peaks that ``graphmem run`` gives for the line: allocated, reserved. Raises :class:`SystemExit`."""
        given = ["--gpu", _CARD, "--cards", str(self.cards), "--format", "json", *options]
        with self._place() as place, tempfile.TemporaryDirectory() as other:
            report = Path(other) / "report.json"
            command = [str(stub.python()), "-m", "graphmem", "run", *given, "-o", str(report), *self.words]
            environment = {**os.environ, **_OFFLINE, **_search((places.ROOT,))}
            subprocess.run(command, cwd=place, env=environment, check=False)
            if not report.exists():
                raise SystemExit(f"{self.name}: no report")
            peak = json.loads(report.read_text(encoding="utf-8"))["peak"]
        return peak["allocated_bytes"], peak["reserved_bytes"]

    @contextlib.contextmanager
    def _place(self) -> Iterator[Path]:
        """A copy of the case's files, and what ``prepare.py`` makes beside them."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / self.name
            shutil.copytree(FOLDER / self.name, place)
            if (place / "prepare.py").exists():
                environment = {**os.environ, **_OFFLINE, **_search((places.ROOT,))}
                subprocess.run([str(stub.python()), "prepare.py"], cwd=place, env=environment, check=True)
            yield place


_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def _search(first: tuple[Path, ...]) -> dict[str, str]:
    """Variables by which commands and packages of the tools' environment are found, ``first`` before the others."""
    paths = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(stub.python().parent), os.environ["PATH"]]),
    }


@dataclass(frozen=True)
class _Lines:
    """The kind."""

    def record(self, arguments: list[str]) -> int:
        for line in _chosen(arguments):
            noted = line.record()
            versions = {name: importlib.metadata.version(name) for name in line.packages}
            document = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
            document[line.name] = {"packages": versions, **noted}
            GOLDEN.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(f"{line.name:16s} {noted['allocated']:15,} {noted['reserved']:15,}", flush=True)
        return 0

    def table(self, arguments: list[str]) -> int:
        """Options of ``graphmem run`` stand behind ``--``."""
        recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
        parts, options = _divided(arguments)
        for line in _chosen(parts):
            truth = recorded[line.name]
            said = dict(zip(("allocated", "reserved"), line.predict(options), strict=True))
            figures = (
                f"{level} {said[level]:,} of {truth[level]:,} ({said[level] - truth[level]:+,})" for level in said
            )
            print(f"{line.name:16s} {'  '.join(figures)}", flush=True)
        return 0

    def differ(self, arguments: list[str]) -> int:
        return self.table(arguments)


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _chosen(parts: list[str]) -> list[Line]:
    cases = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*/case.json")}
    lines = [Line(name, **case) for name, case in sorted(cases.items())]
    return [line for line in lines if not parts or any(part in line.name for part in parts)]


def note_peaks(folder: str) -> None:
    """In a process of the line: follow small values, be the only member of process groups, and note both peaks at the
    end in ``folder``. A process other than the first of several ends at once."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        os._exit(0)
    import torch

    from graphmem.base.imports import watched_imports
    from tests.recorded import true_values
    from tests.recorded.record import launch_no_triton
    from tests.recorded.scripts import without_others
    from tests.recorded.whole import peaks_of_the_whole

    launch_no_triton()
    without_others()
    cards, counted = int(os.environ["GRAPHMEM_LINE_CARDS"]), torch.cuda.device_count
    torch.cuda.device_count = lambda: counted() if hasattr(torch.cuda._tls, "is_initializing") else cards
    own, process = os.path.join(folder, str(os.getpid())), os.getpid()
    stack = contextlib.ExitStack()
    peaks = stack.enter_context(peaks_of_the_whole())
    followed = {"vllm.v1.worker.gpu.async_utils": _sampling, "trl.trainer.utils": _logging}
    stack.enter_context(watched_imports(followed))
    if "GRAPHMEM_LINE_COMPILES" not in os.environ:
        stack.enter_context(true_values.follow(f"{own}.values"))

    def note() -> None:
        if os.getpid() != process or not torch.cuda.is_initialized():
            return
        stats = torch.cuda.memory_stats()
        document: dict[str, Any] = {level: max(peaks[level], stats[f"{level}_bytes.all.peak"]) for level in peaks}
        Path(f"{own}.json").write_text(json.dumps(document), encoding="utf-8")
        stack.close()

    atexit.register(note)


def _sampling(module: ModuleType, run: Callable[[], None]) -> None:
    """vLLM's kernels say how many tokens each sequence got. The stub's say none, and it would decode for ever."""
    import numpy as np

    run()
    copied = vars(module)["async_copy_to_np"]
    vars(module)["async_copy_to_np"] = lambda tensor: np.ones_like(copied(tensor))


def _logging(module: ModuleType, run: Callable[[], None]) -> None:
    """TRL's least and largest number of those that are none: where no kernel computes, all of them."""
    run()
    vars(module).update(nanmin=lambda tensor: tensor.min(), nanmax=lambda tensor: tensor.max())


KIND = _Lines()
