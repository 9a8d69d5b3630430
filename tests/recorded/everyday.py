"""Everyday programs (:mod:`tests.recorded.cases.everyday`): files, run as ``python FILE`` runs them, recorded as
:mod:`tests.recorded.whole` says, and predicted as ``graphmem run FILE`` predicts them."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import places
from tests.recorded.whole import CARD, WholePrograms

if TYPE_CHECKING:
    from graphmem.run import Run

FOLDER = places.ROOT / "tests" / "recorded" / "cases" / "everyday"
#: More optimizer steps than any of the programs takes: they end by themselves.
_STEPS = 200


@dataclass(frozen=True)
class EverydayProgram:
    """A file, predicted in ``steps`` optimizer steps; None for as many as ``graphmem run`` follows."""

    path: Path
    steps: int | None = _STEPS

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def needs(self) -> tuple[str, ...]:
        """The packages that it imports beside torch and numpy."""
        imported: set[str] = set()
        for node in ast.walk(ast.parse(self.path.read_bytes())):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module)
        packages = {name.partition(".")[0] for name in imported}
        return tuple(sorted(packages - set(sys.stdlib_module_names) - {"torch", "numpy"}))

    @property
    def compiles(self) -> bool:
        """Whether it calls ``torch.compile``."""
        return b"torch.compile" in self.path.read_bytes()

    def run(self) -> Any:
        import runpy

        sys.argv = [str(self.path)]
        sys.path.insert(0, str(self.path.parent))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # what it saves is left there
            tempfile.tempdir = folder
            try:
                return runpy.run_path(str(self.path), run_name="__main__")
            except SystemExit as error:
                if error.code:
                    raise
                return None

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        from graphmem.answering import runs
        from graphmem.answering.question import Question
        from graphmem.training.program import Program

        question = Question(
            Program(str(self.path)),
            device=CARD,
            iterations=self.steps,
            torch_version=".".join(map(str, torch_version)),
            cudnn=library or "never",
        )
        with contextlib.redirect_stdout(io.StringIO()):
            made = runs.record(question, runs.load(question))
        assert made.ending is not None
        assert not made.ending.failed, made.ending.words()
        return made


def programs() -> dict[str, EverydayProgram]:
    """Every file of the folder, by its name."""
    found = (EverydayProgram(path) for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__")
    return {program.name: program for program in found}


KIND = WholePrograms("everyday", places.PYTORCH / "everyday", programs)
