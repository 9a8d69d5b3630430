"""graphmem: how much GPU memory a deep-learning model will need, without a GPU."""

from __future__ import annotations

from graphmem.analyze import analyze, operator_graph, replay_trace
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.training import Inference, Training

__all__ = ["Estimate", "GraphmemError", "Inference", "Training", "analyze", "operator_graph", "replay_trace"]
__version__ = "0.1.0"
