"""Programs that are left early (:mod:`tests.recorded.cases.left_early`): files, recorded to their end as
:mod:`tests.recorded.whole` says, and predicted as ``graphmem run FILE`` predicts them, in a few steps a run."""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.training.program import OPTIMIZER_STEPS
from tests import places
from tests.recorded.everyday import EverydayProgram
from tests.recorded.whole import WholePrograms

FOLDER = places.ROOT / "tests" / "recorded" / "cases" / "left_early"
#: What predictions reached: errors of both peaks in bytes.
RATCHET = places.PYTORCH / "left_early_ratchet.json"


@dataclass(frozen=True)
class ShortenedProgram(EverydayProgram):
    """A file, predicted in as many steps as ``graphmem run`` takes."""

    steps: int = OPTIMIZER_STEPS


def programs() -> dict[str, ShortenedProgram]:
    """Every file of the folder, by its name."""
    found = (ShortenedProgram(path) for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__")
    return {program.name: program for program in found}


KIND = WholePrograms("left_early", places.PYTORCH / "left_early", programs)
