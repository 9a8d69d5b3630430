"""Record what the loops allocate on a CUDA build of PyTorch: ``python -m tests.loops.record [part of a name ...]``.

Writes ``tests/golden/pytorch/loops/<group>.jsonl.gz`` (:mod:`tests.recorded.recording`). Without names every group is
written anew; with names only the loops that contain one of them.
"""

from __future__ import annotations

import sys

from tests.loops import runner
from tests.loops.cases import CASES
from tests.recorded.recording import GOLDEN, Documents, load, record_all

FOLDER = GOLDEN / "loops"


def recordings() -> Documents:
    """Every recording by name of its loop."""
    return load(FOLDER)


if __name__ == "__main__":
    record_all(FOLDER, CASES, runner.run, sys.argv[1:], wanted=lambda case: not case.refused)
