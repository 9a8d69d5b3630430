"""Findings on the runs of an ONNX Runtime session: why they differ, and savings of other options.

Every saving is a plan and a replay of its own under the other option, never a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphmem.allocators.onnxruntime_arena import ExtendStrategy
from graphmem.diagnostics import Code, Diagnostic
from graphmem.estimate import Findings
from graphmem.graph.model import Graph
from graphmem.replay import Replay, replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import Options
from graphmem.runtimes.onnxruntime.plan.pattern import pattern_key
from graphmem.runtimes.onnxruntime.plan.process import Planned, plan
from graphmem.trace import Trace
from graphmem.units import format_bytes

Sessions = Sequence[Sequence[Graph]]

#: Allocations and frees of a trace from which on other options are not tried: a plan and a replay of each is a second.
MOST_EVENTS = 100_000


def replayed(trace: Trace, options: Options, sessions: int = 1) -> Replay:
    """``trace`` in the arenas of ``options``, without a limit of the card."""
    allocator = default_allocator(options, reserved=reserved_allocations(trace, options), sessions=sessions)
    return replay(trace, allocator)


def reserved_after_runs(trace: Trace, result: Replay) -> dict[int, int]:
    """Bytes the arenas hold at most during each run, by its number; 0 is loading."""
    held: dict[int, int] = {}
    phases = [trace.phases[operator.phase].iteration for operator in trace.operators]
    for operator, size in zip(trace.event_operators.tolist(), result.reserved_bytes.tolist(), strict=True):
        held[phases[operator]] = max(held.get(phases[operator], 0), size)
    return held


def findings(sessions: Sessions, options: Options, planned: Planned) -> Findings:
    """Sentences for the reader, and figures in bytes for the details of an estimate."""
    base = replayed(planned.trace, options, len(sessions))
    held = reserved_after_runs(planned.trace, base)
    sentences = [*_growth(held, planned), *_collisions(sessions, options)]
    others: dict[str, int] = {}
    is_long = len(planned.trace) > MOST_EVENTS
    if is_long:
        sentences.append(f"other options were not tried: the runs allocate and free {len(planned.trace):,} times")
    for words, changed in () if is_long else _alternatives(options):
        plans = [replace(made, settings=changed.session) for made in planned.plans]  # none of these moves a buffer
        trace = plan(sessions, changed, plans=plans).trace
        peak = replayed(trace, changed, len(sessions)).peak_reserved_bytes
        others[words] = peak
        if peak < base.peak_reserved_bytes:
            sentences.append(f"{words} would save {format_bytes(base.peak_reserved_bytes - peak)} of reserved memory")
    runs = {f"run {number}" if number else "load": size for number, size in sorted(held.items())}
    notes = tuple(Diagnostic(Code.NOTE, sentence) for sentence in sentences)
    return Findings(notes, {"reserved_bytes_by_run": runs, "reserved_bytes_with": others})


def _growth(held: dict[int, int], planned: Planned) -> list[str]:
    """Why the second run of a shape takes more than the first."""
    if held.get(2, 0) <= held.get(1, 0):
        return []
    block = sum(sizes[1] for sizes in planned.blocks if len(sizes) > 1)
    more = format_bytes(held[2] - held[1])
    if not block:
        return [f"run 2 holds {more} more than run 1: its tensors do not fit the free chunks that run 1 left"]
    return [
        f"run 2 holds {more} more than run 1: with enable_mem_pattern it allocates its tensors as one block of "
        f"{format_bytes(block)}, which does not fit the chunks that run 1 left in the arena"
    ]


def _collisions(sessions: Sessions, options: Options) -> list[str]:
    """Runs that find the pattern of another shape, because keys are XORs of dimensions."""
    if not options.session.enable_mem_pattern:
        return []
    sentences = []
    for graphs in sessions:
        first: dict[int, int] = {}
        shapes = [[tuple(map(int, graph.tensors[name].shape)) for name in graph.inputs] for graph in graphs]
        for run, dimensions in enumerate(shapes):
            earlier = first.setdefault(pattern_key(dimensions), run)
            if shapes[earlier] != dimensions:
                sentences.append(
                    f"run {run + 1} of {graphs[0].name} finds the memory pattern of run {earlier + 1}, whose shapes "
                    "are others: it allocates that block and every tensor besides (the key of a pattern is the XOR of "
                    "all input dimensions)"
                )
    return sentences


def _alternatives(options: Options) -> list[tuple[str, Options]]:
    """Each option that may take less memory, turned from what it is."""
    changes: list[tuple[str, Callable[[], Options]]] = []
    may_fit = options.arena.max_dead_bytes_per_chunk > 0  # else the first chunk that fits exactly ends the process
    if may_fit and options.arena.arena_extend_strategy != ExtendStrategy.kSameAsRequested:
        arena = replace(options.arena, arena_extend_strategy=ExtendStrategy.kSameAsRequested)
        changes.append(("arena_extend_strategy:kSameAsRequested", lambda: replace(options, arena=arena)))
    if options.session.enable_mem_pattern:
        off = replace(options.session, enable_mem_pattern=False)
        changes.append(("enable_mem_pattern:0", lambda: replace(options, session=off)))
    if not options.session.enable_memory_arena_shrinkage:
        shrinking = replace(options.session, enable_memory_arena_shrinkage=True)
        changes.append(("memory.enable_memory_arena_shrinkage", lambda: replace(options, session=shrinking)))
    made = [(words, make()) for words, make in changes]
    if len(made) > 2:
        both = replace(made[0][1], session=made[1][1].session)
        made.append((f"{made[0][0]},{made[1][0]}", both))
    return made
