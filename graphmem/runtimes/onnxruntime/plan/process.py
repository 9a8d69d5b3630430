"""The trace of a process with one or more sessions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import field

from graphmem.base.records import dataclass
from graphmem.graph.model import Graph
from graphmem.runtimes.onnxruntime.options import Options
from graphmem.runtimes.onnxruntime.plan.runs import Runs
from graphmem.runtimes.onnxruntime.plan.session import SessionPlan, plan_session
from graphmem.trace import Trace, TraceBuilder


@dataclass(frozen=True)
class Planned:
    """A trace of one or more sessions, and the bytes of the pattern block of each run of each session.

    ``host_nodes`` counts the nodes that run on the CPU beside a GPU, ``unknown`` by operator those whose kernels take
    working buffers that are not in the trace. ``cudnn_notes``: remarks on the cuDNN that was asked;
    ``predicted_plans``: of how many shapes of convolutions the plans were predicted.
    """

    trace: Trace
    blocks: tuple[tuple[int, ...], ...]
    plans: tuple[SessionPlan, ...] = ()
    host_nodes: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)
    uses_cublas: bool = False
    cudnn_notes: tuple[str, ...] = ()
    predicted_plans: int = 0


def plan(
    sessions: Sequence[Sequence[Graph]],
    options: Options | None = None,
    *,
    plans: Sequence[SessionPlan] | None = None,
    refused_bytes: int = sys.maxsize,
) -> Planned:
    """The trace of one session for each sequence of graphs, which are the shapes of its runs in order.

    ``plans`` are the sessions' plans where they are known already: they do not depend on shapes. Blocks of memory
    patterns from ``refused_bytes`` on are not had, and their tensors allocated one by one. Sessions are loaded
    one after another and then run in turns, as one process with several models does.
    """
    chosen = options or Options()
    names = ", ".join(dict.fromkeys(graphs[0].name for graphs in sessions))
    notes = dict(note for graphs in sessions for note in graphs[0].notes)
    builder = TraceBuilder(source=names, notes=list(notes.items()))
    runs = []
    memory = chosen.kernel_memory()
    for index, graphs in enumerate(sessions):
        name = graphs[0].name
        is_again = any(other[0].name == name for other in sessions[:index])  # phases differ by their names
        prefix = "" if len(sessions) == 1 else f"{name} ({index + 1}) " if is_again else f"{name} "
        made = plans[index] if plans is not None else plan_session(graphs[0], chosen.session)
        runs.append(Runs(made, memory, builder, index, prefix=prefix, refused_bytes=refused_bytes))
        runs[-1].load(graphs[0])
    for iteration in range(max(map(len, sessions))):
        for session, graphs in zip(runs, sessions, strict=True):
            if iteration < len(graphs):
                session.run(graphs[iteration], iteration + 1)
    made_plans = tuple(session.plan for session in runs)
    every_plan = [one for made in made_plans for one in made.with_bodies]
    return Planned(
        builder.build(),
        tuple(tuple(session.blocks) for session in runs),
        made_plans,
        sum(len(one.host_nodes) for one in every_plan),
        memory.unknown(every_plan),
        any(memory.uses_cublas(one.nodes) for one in every_plan),
        () if memory.libraries is None else tuple(memory.libraries.notes()),
        0 if memory.libraries is None else len(memory.libraries.predicted),
    )
