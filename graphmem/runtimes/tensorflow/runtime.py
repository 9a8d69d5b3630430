"""The runtime ``tensorflow``: its options, its plans of graphs, and what its allocator does with a trace."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

from graphmem.base.figures import unknown
from graphmem.errors import UsageError
from graphmem.graph.model import Graph
from graphmem.runtimes.base import GRAPH_RUNS, Graphs, Runs, Runtime, Setting, Taken
from graphmem.runtimes.tensorflow.card import describe, run_on_card, with_eigen_scratch
from graphmem.runtimes.tensorflow.executor import plan_executor
from graphmem.runtimes.tensorflow.options import TensorFlowOptions, read_options
from graphmem.trace import Trace

CAPTURED_ASSUMED = (
    "operators, their order, temporaries and library workspaces are PyTorch's, replayed under TensorFlow's allocator"
)
XLA_ASSUMED = (
    "XLA is off and operators run one by one; Keras turns XLA on by default on GPUs (jit_compile='auto'), and then "
    "activations lie in one temporary buffer that XLA plans, which is not modelled"
)


class TensorFlow(Runtime[TensorFlowOptions]):
    """TensorFlow's executor and its GPU allocator."""

    name = "tensorflow"
    title = "TensorFlow"
    spellings = ("tf", "keras")
    levels = (
        ("requested", "what the tensors asked for"),
        ("allocated", "chunks in use (get_memory_info: peak)"),
        ("reserved", "regions held from the driver (pool_bytes)"),
        ("device", "nvidia-smi's line of the process: reserved plus context"),
    )
    graphs = Graphs.PLANNED
    proven = "tests/golden/tensorflow"

    def parse(self, text: str | None, setting: Setting) -> TensorFlowOptions:
        """The options of a run on this machine: ``text`` and the environment. Raises
        :class:`~graphmem.errors.UsageError`."""
        return read_options(text or "", os.environ)

    def describe(self, options: TensorFlowOptions, setting: Setting) -> str:
        """The allocator with its limit on the card."""
        return describe(options, setting.device)

    def take(self, trace: Trace) -> Taken:
        """A captured trace, after the device's own scratch buffer."""
        return Taken(with_eigen_scratch(trace), (CAPTURED_ASSUMED, XLA_ASSUMED), doubts=_DOUBTS, proven=self.proven)

    def plan(self, sessions: Sequence[Sequence[Graph]], options: TensorFlowOptions, iterations: int | None) -> Taken:
        """One graph as the executor runs it. Raises :class:`~graphmem.errors.GraphmemError` for several of them, or
        shapes, and for control flow."""
        if len(sessions) != 1 or len(sessions[0]) != 1:
            raise UsageError("several ONNX files, or runs of several shapes (--shapes), are for --runtime onnxruntime")
        trace = plan_executor(sessions[0][0], iterations=iterations or GRAPH_RUNS)
        assumptions = (*(f"{key}: {value}" for key, value in trace.notes), XLA_ASSUMED)
        return Taken(with_eigen_scratch(trace), assumptions, doubts=_DOUBTS, proven=self.proven)

    def plan_options(self, options: TensorFlowOptions) -> Hashable:
        """None: the executor looks at no option of the allocator."""
        return None

    def run(self, trace: Trace, options: TensorFlowOptions, setting: Setting) -> Runs:
        """Replayed under the limit that TensorFlow sets itself on the card."""
        runs = run_on_card(trace, options, setting.device)
        return Runs(runs.main, runs.limited, runs.notes, dict(runs.details))


#: What no recording holds.
_DOUBTS = (
    unknown("TensorFlow's kernels", "its allocator was recorded, on a CPU; its steps on a card were not", below=True),
)
RUNTIME = TensorFlow()
