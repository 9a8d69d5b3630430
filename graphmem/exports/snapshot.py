"""A memory snapshot of PyTorch, for https://pytorch.org/memory_viz."""

from __future__ import annotations

from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.exports import Asked, trace_of
from graphmem.runtimes.pytorch import makers, snapshot


class Snapshot:
    name = "snapshot"
    suffixes = (".pickle", ".pkl")
    is_binary = True

    def render(self, estimate: Estimate, asked: Asked) -> bytes:
        """A pickle of plain values. Raises :class:`UsageError` for a run under another allocator than PyTorch's."""
        if estimate.runtime != "pytorch":
            raise UsageError(f"a snapshot is of PyTorch's allocator, and this runs under {estimate.runtime}")
        if makers.METAL_HEAPS in estimate.allocator:
            raise UsageError(
                f"a snapshot is of CUDA's segments, and PyTorch has {makers.METAL_HEAPS} on {estimate.gpu}"
            )
        return snapshot.render(trace_of(estimate), asked.alloc_conf, asked.torch_version)


EXPORT = Snapshot()
