"""graphmem: how much GPU memory a deep-learning model will need, without a GPU."""

from graphmem.errors import GraphmemError

__all__ = ["GraphmemError"]
