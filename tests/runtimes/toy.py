"""A runtime as a package elsewhere would bring it: nothing of graphmem names it.

It rounds every request up, keeps nothing, and plans a graph as one allocation for each of its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from graphmem.allocators.ideal import IdealAllocator, IdealBlock
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import UsageError
from graphmem.estimate import Findings
from graphmem.graph.model import Graph
from graphmem.runtimes.base import GRAPH_RUNS, Graphs, Runs, Runtime, Setting, Taken, within_card
from graphmem.trace import Category, Trace, TraceBuilder


@dataclass(frozen=True)
class ToyOptions:
    """``round_bytes``: what requests are rounded up to."""

    round_bytes: int = 1024


class RoundingAllocator(IdealAllocator):
    def __init__(self, round_bytes: int, capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self._round = round_bytes

    def malloc(self, size: int, stream: int = 0) -> IdealBlock | None:
        return super().malloc(-(-size // self._round) * self._round, stream)


class Toy(Runtime[ToyOptions]):
    name = "toy"
    title = "Toy"
    spellings = ("plaything",)
    graphs = Graphs.PLANNED

    def __init__(self) -> None:
        self.looked = 0

    def parse(self, text: str | None, setting: Setting) -> ToyOptions:
        if not text:
            return ToyOptions()
        match = re.fullmatch(r"round:([1-9][0-9]{0,8})", text)
        if match is None:
            raise UsageError(f"cannot read {text!r}; accepted: round:BYTES")
        return ToyOptions(int(match[1]))

    def describe(self, options: ToyOptions, setting: Setting) -> str:
        return f"toy allocator, in steps of {options.round_bytes} bytes"

    def run(self, trace: Trace, options: ToyOptions, setting: Setting) -> Runs:
        return within_card(trace, lambda capacity: RoundingAllocator(options.round_bytes, capacity), setting.device)

    def plan(self, sessions: Sequence[Sequence[Graph]], options: ToyOptions, iterations: int | None) -> Taken:
        builder = TraceBuilder(sessions[0][0].name)
        for run in range(iterations or GRAPH_RUNS):
            operator = builder.operator("all", phase=builder.phase(run + 1, "run"))
            held = [
                builder.alloc(spec.nbytes, operator, Category.ACTIVATION)
                for graphs in sessions
                for spec in graphs[0].tensors.values()
            ]
            for storage in held:
                builder.free(storage, operator)
        return Taken(builder.build(), ("every tensor lives through the run",), findings=self._look)

    def plan_options(self, options: ToyOptions) -> None:
        return None

    def _look(self, options: ToyOptions) -> Findings:
        self.looked += 1
        return Findings(
            (Diagnostic(Code.NOTE, f"steps of {options.round_bytes}"),), {"round_bytes": options.round_bytes}
        )


RUNTIME = Toy()
