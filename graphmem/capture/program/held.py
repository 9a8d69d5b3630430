"""Storages that a program holds from step to step: averaged copies, caches of keys and values, its own buffers."""

from __future__ import annotations

import numpy as np

from graphmem.capture.record.recorder import Recorder
from graphmem.trace import Category, EventKind, Place

#: The categories of storages of which nothing more is known.
_UNNAMED = (Category.TEMPORARY, Category.ACTIVATION)


def label_held(recorder: Recorder) -> None:
    """Give storages the category :attr:`Category.HELD` that live through a whole iteration, or from one forward pass
    of an evaluation or a generation to the end of the next one, or beyond its beginning in a generation."""
    builder = recorder.builder
    if not builder.rows:
        return
    kinds, subjects, operators, _ = builder.columns().T
    end = len(kinds)
    allocations, frees = (np.flatnonzero(kinds == kind) for kind in (EventKind.ALLOC, EventKind.FREE))
    born, died = (np.full(len(builder.storage_bytes), end, dtype=np.int64) for _ in range(2))
    born[subjects[allocations]], died[subjects[frees]] = allocations, frees

    unnamed = np.isin(builder.categories, _UNNAMED) & (np.array(builder.places) == Place.DEVICE) & (born < end)
    storages = np.flatnonzero(unnamed)
    born, died = born[storages], died[storages]
    phases = np.array([operator.phase for operator in builder.operators])[operators]  # by row
    iterations = np.array([phase.iteration for phase in builder.phases])[phases]
    generates = np.array([phase.name == "generate" for phase in builder.phases])[phases]

    lives_through = iterations[np.minimum(died, end - 1)] + (died >= end) - iterations[born] >= 2
    # Forward passes beside the iterations that begin while it lives: one in a generation, which keeps it for the next
    # token; two elsewhere, as a variable keeps its last value until the next one is there.
    passes = np.array(recorder.phases.passes_aside, dtype=np.int64)
    begun = np.searchsorted(passes, died) - np.searchsorted(passes, born + 1)
    crosses = begun >= np.where(generates[born], 1, 2)
    for index in storages[lives_through | crosses]:
        builder.categories[index] = Category.HELD
