"""Planning the memory of a graph: in which order its nodes run, at which addresses its buffers lie, what is made again.

A :class:`Graph` says what a :class:`graphmem.trace.Trace` cannot: which other orders would do. Sizes are requested
bytes. What knows PyTorch or ONNX, or has compiled parts, is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from graphmem.plan_memory.compared import PeakChange, compare_graphs
from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.plan_memory.offloading import Move, Offload, offload
from graphmem.plan_memory.recompute.answer import Remat, remat

if TYPE_CHECKING:
    from graphmem.plan_memory.addresses import AddressPlan, offsets
    from graphmem.plan_memory.orders import Schedule, reorder
    from graphmem.plan_memory.peaks import Peaks
    from graphmem.sources.fx_graph.annotating import NodeMemory, annotate
    from graphmem.sources.fx_graph.checkpoints import Checkpoints, checkpoint_modules
    from graphmem.sources.fx_graph.compile_pass import CompiledPeak, CompilePass, compile_pass
    from graphmem.sources.fx_graph.joint import joint_graph
    from graphmem.sources.fx_graph.partitions import RematPartitioner, join_partitions, partition_within
    from graphmem.sources.fx_graph.reading import from_fx
    from graphmem.sources.fx_graph.writing import apply_offload, apply_order, apply_remat
    from graphmem.sources.onnx_graph import apply_onnx_order, from_onnx
    from graphmem.sources.stablehlo_graph import from_stablehlo

__all__ = [
    "AddressPlan",
    "Buffer",
    "Checkpoints",
    "CompilePass",
    "CompiledPeak",
    "Graph",
    "Move",
    "Node",
    "NodeMemory",
    "Offload",
    "PeakChange",
    "Peaks",
    "Remat",
    "RematPartitioner",
    "Schedule",
    "annotate",
    "apply_offload",
    "apply_onnx_order",
    "apply_order",
    "apply_remat",
    "checkpoint_modules",
    "compare_graphs",
    "compile_pass",
    "from_fx",
    "from_onnx",
    "from_stablehlo",
    "join_partitions",
    "joint_graph",
    "offload",
    "offsets",
    "partition_within",
    "remat",
    "reorder",
]

_PLACES = {
    **dict.fromkeys(("AddressPlan", "offsets"), "plan_memory.addresses"),
    **dict.fromkeys(("Schedule", "reorder"), "plan_memory.orders"),
    "Peaks": "plan_memory.peaks",
    **dict.fromkeys(("NodeMemory", "annotate"), "sources.fx_graph.annotating"),
    **dict.fromkeys(("CompilePass", "CompiledPeak", "compile_pass"), "sources.fx_graph.compile_pass"),
    **dict.fromkeys(("Checkpoints", "checkpoint_modules"), "sources.fx_graph.checkpoints"),
    **dict.fromkeys(("RematPartitioner", "join_partitions", "partition_within"), "sources.fx_graph.partitions"),
    "from_fx": "sources.fx_graph.reading",
    "joint_graph": "sources.fx_graph.joint",
    **dict.fromkeys(("apply_offload", "apply_order", "apply_remat"), "sources.fx_graph.writing"),
    **dict.fromkeys(("apply_onnx_order", "from_onnx"), "sources.onnx_graph"),
    "from_stablehlo": "sources.stablehlo_graph",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"graphmem.{_PLACES[name]}"), name)
    globals()[name] = found
    return found
