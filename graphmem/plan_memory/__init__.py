"""Planning the memory of a graph: in which order its nodes run, at which addresses its buffers lie.

A :class:`Graph` says what a :class:`graphmem.trace.Trace` cannot: which other orders would do. Sizes are requested
bytes.
"""

from graphmem.plan_memory.graphs import Buffer, Graph, Node

__all__ = ["Buffer", "Graph", "Node"]
