"""The interface by which a capture asks a runtime's allocator about the card's memory while a program runs."""

from __future__ import annotations

from typing import Any, Protocol

from graphmem.trace import TraceBuilder


class DeviceMemory(Protocol):
    """The card's memory as the allocator keeps it while the program runs. All figures are bytes."""

    def follow(self, builder: TraceBuilder) -> None:
        """Answer for the events of ``builder``, those to come included."""

    def lift_limit(self) -> None:
        """From now on no request is refused."""

    def refusal(self, index: int) -> str | None:
        """PyTorch's message where the request for storage ``index``, recorded just now, is out of memory."""

    def statistics(self) -> dict[str, Any]:
        """The result of ``torch._C._cuda_memoryStats`` now."""

    def reset_peaks(self) -> None: ...

    def reset_accumulated(self) -> None: ...

    def free_bytes(self) -> int:
        """The free bytes by ``cudaMemGetInfo`` now."""

    def segments(self) -> list[dict[str, Any]]:
        """The segments of ``torch.cuda.memory_snapshot`` now."""

    def history(self) -> dict[str, Any]:
        """The same with every event so far, as where ``torch.cuda.memory._record_memory_history`` was called."""

    @property
    def fraction(self) -> float: ...

    def fraction_set(self, fraction: float) -> None:
        """The program limits itself to this part of the card's memory; the event is recorded."""
