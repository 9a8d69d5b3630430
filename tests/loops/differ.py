"""Show where predictions leave the recordings: ``python -m tests.loops.differ [-v] [part of a name ...]``."""

from __future__ import annotations

import sys

from tests.loops.cases import CASES
from tests.loops.predict import predict
from tests.loops.record import recordings
from tests.recorded.differing import show

if __name__ == "__main__":
    show(CASES, recordings(), predict, sys.argv[1:])
