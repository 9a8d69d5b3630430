"""Every error graphmem raises on purpose.

One root, :class:`GraphmemError`, so that a caller can catch them all and the command line can turn each into one line:
what is wrong, where, and what to do about it.
"""

from __future__ import annotations


class GraphmemError(Exception):
    """Root of all errors meant for users. ``str(error)`` is one self-contained message."""


class UsageError(GraphmemError):
    """An option, name or value that graphmem does not accept; the message lists what it does accept."""


class SourceError(GraphmemError):
    """The thing to analyse cannot be loaded: missing, truncated, of the wrong kind, or failing on its own."""


class ShapeError(SourceError):
    """A shape is unbound, inconsistent, or cannot be inferred."""


class CaptureError(GraphmemError):
    """The step cannot be run on fake tensors, for example because it needs the data itself."""


class TraceError(GraphmemError):
    """A trace or snapshot breaks the rules of its format."""


class DeviceOutOfMemory(GraphmemError):
    """A simulated allocator could not serve a request within its limit."""

    def __init__(self, message: str, *, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
