"""graphmem: how much GPU memory a deep-learning model will need, without a GPU."""

from __future__ import annotations

from graphmem.analyze import analyze, operator_graph, replay_trace
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.planning.advise import advise
from graphmem.planning.fit import fit
from graphmem.planning.plan import Plan, plan
from graphmem.planning.serving import ServingReport, serve
from graphmem.planning.sweep import sweep
from graphmem.training import Inference, Training

__all__ = [
    "Estimate",
    "GraphmemError",
    "Inference",
    "Plan",
    "ServingReport",
    "Training",
    "advise",
    "analyze",
    "fit",
    "operator_graph",
    "plan",
    "replay_trace",
    "serve",
    "sweep",
]
__version__ = "0.1.0"
