"""Show where predictions leave the recordings: ``python -m tests.functions.differ [-v] [part of a name ...]``."""

from __future__ import annotations

import gc
import sys

from tests.functions.cases import CASES
from tests.functions.predict import predict
from tests.functions.record import recordings
from tests.recorded.differing import show

if __name__ == "__main__":
    gc.freeze()
    show(CASES, recordings(), predict, sys.argv[1:])
