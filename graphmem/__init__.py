"""graphmem: how much GPU memory a deep-learning model will need, without a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphmem.analyze import analyze, operator_graph, replay_trace
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.training import Inference, Training

if TYPE_CHECKING:
    from graphmem.planning.advise import advise
    from graphmem.planning.fit import fit
    from graphmem.planning.plan import Plan, plan
    from graphmem.planning.serving import ServingReport, serve
    from graphmem.planning.sweep import sweep

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

#: What asks more than one question; imported when it is used, as one question needs none of it.
_PLANNING = {
    "Plan": "plan",
    "ServingReport": "serving",
    "advise": "advise",
    "fit": "fit",
    "plan": "plan",
    "serve": "serving",
    "sweep": "sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _PLANNING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"graphmem.planning.{_PLANNING[name]}"), name)
