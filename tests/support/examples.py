"""How many examples a property test tries: a quarter of its number in every run, all of them in ``.ci/slow``."""

from __future__ import annotations

import os

#: The environment variable by which all are tried: ``all``.
VARIABLE = "GRAPHMEM_EXAMPLES"
#: What hypothesis tries where a test says nothing.
USUAL = 100
_LEAST = 5


def examples(number: int) -> int:
    """The share of ``number`` examples to try in this run."""
    if os.environ.get(VARIABLE) == "all":
        return number
    return min(number, max(_LEAST, number // 4))
