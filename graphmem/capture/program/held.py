"""What a program holds from step to step is no temporary: averaged copies, caches of keys and values, own buffers."""

from __future__ import annotations

from bisect import bisect_left

from graphmem.capture.record.recorder import Recorder
from graphmem.trace import Category, EventKind, Place, TraceBuilder

#: What storages are taken for that nothing tells more of.
_UNNAMED = (Category.TEMPORARY, Category.ACTIVATION)


def label_held(recorder: Recorder) -> None:
    """Give storages the category :attr:`Category.HELD` that live through a whole iteration, or from one forward pass
    of an evaluation or a generation to the end of the next one, or beyond its beginning in a generation."""
    builder, passes = recorder.builder, recorder.passes_aside
    for index, (born, died) in _lives(builder).items():
        if builder.categories[index] not in _UNNAMED or builder.places[index] is not Place.DEVICE:
            continue
        first, last = (_iteration(builder, row) for row in (born, min(died, len(builder.rows) - 1)))
        lives_on = last + (died >= len(builder.rows))
        if lives_on - first >= 2 or _crosses(builder, passes, born, died):
            builder.categories[index] = Category.HELD


def _lives(builder: TraceBuilder) -> dict[int, tuple[int, int]]:
    """Storage -> rows of its birth and death; the end of the rows where it stays."""
    lives: dict[int, tuple[int, int]] = {}
    end = len(builder.rows)
    for row, (kind, subject, _, _) in enumerate(builder.rows):
        if kind == EventKind.ALLOC:
            lives[subject] = row, end
        elif kind == EventKind.FREE:
            lives[subject] = lives[subject][0], row
    return lives


def _phase(builder: TraceBuilder, row: int) -> tuple[int, str]:
    phase = builder.phases[builder.operators[builder.rows[row][2]].phase]
    return phase.iteration, phase.name


def _iteration(builder: TraceBuilder, row: int) -> int:
    return _phase(builder, row)[0]


def _crosses(builder: TraceBuilder, passes: list[int], born: int, died: int) -> bool:
    """Whether forward passes beside the iterations begin while it lives: one in a generation, which keeps it for the
    next token; two elsewhere, as a variable keeps its last value until the next one is there."""
    begun = bisect_left(passes, died) - bisect_left(passes, born + 1)
    return begun >= (1 if _phase(builder, born)[1] == "generate" else 2)
