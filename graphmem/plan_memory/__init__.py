"""Planning the memory of a graph: in which order its nodes run, at which addresses its buffers lie, what is made again.

A :class:`Graph` says what a :class:`graphmem.trace.Trace` cannot: which other orders would do. Sizes are requested
bytes. What knows PyTorch or ONNX is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.plan_memory.recompute.answer import Remat, remat

if TYPE_CHECKING:
    from graphmem.sources.fx_graph.annotating import NodeMemory, annotate
    from graphmem.sources.fx_graph.reading import from_fx
    from graphmem.sources.fx_graph.writing import apply_order, apply_remat

__all__ = [
    "Buffer",
    "Graph",
    "Node",
    "NodeMemory",
    "Remat",
    "annotate",
    "apply_order",
    "apply_remat",
    "from_fx",
    "remat",
]

_PLACES = {
    "NodeMemory": "fx_graph.annotating",
    "annotate": "fx_graph.annotating",
    "apply_order": "fx_graph.writing",
    "apply_remat": "fx_graph.writing",
    "from_fx": "fx_graph.reading",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"graphmem.sources.{_PLACES[name]}"), name)
    globals()[name] = found
    return found
