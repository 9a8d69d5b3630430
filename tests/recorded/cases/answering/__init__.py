"""Whole programs that ask the allocator while they run, and act on what it says; each a function of no arguments.

Every program returns what it found out: a dictionary of whole numbers, by name. Nothing here knows graphmem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.recorded.cases.answering import chunks, decorated, errors, fractions, halving, plans, scaler

#: MiB of the card that they are run on, and how many of it others hold: what a CUDA context takes, say.
CARD_MIB, OTHER_MIB = 6144, 480

Program = Callable[[], Mapping[str, int]]

PROGRAMS: dict[str, Program] = {
    "accelerate_decorator": decorated.main,
    "lightning_scaler": scaler.main,
    "halving_loop": halving.main,
    "chunk_by_free_memory": chunks.main,
    "half_of_the_card": fractions.main,
    "errors_here_and_there": errors.main,
    "later_plans": plans.main,
}
#: Those that are recorded with cuDNN's own plans.
WITH_CUDNN = ("later_plans",)
