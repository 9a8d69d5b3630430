"""Record what the cases allocate on a CUDA build of PyTorch: ``python -m tests.functions.record [part of a name ...]``.

Writes ``tests/golden/pytorch/functions/<group>.jsonl.gz`` (:mod:`tests.recorded.recording`). Without names every group
is written anew; with names only the cases that contain one of them.
"""

from __future__ import annotations

import sys

from tests.functions import runner
from tests.functions.cases import CASES
from tests.recorded.recording import GOLDEN, Documents, load, record_all

FOLDER = GOLDEN / "functions"


def recordings() -> Documents:
    """Every recording by name of its case."""
    return load(FOLDER)


if __name__ == "__main__":
    record_all(FOLDER, CASES, runner.run, sys.argv[1:])
