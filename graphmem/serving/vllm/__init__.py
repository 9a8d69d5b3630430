"""vLLM: its start followed step by step on our allocator, then its own arithmetic. ``engine`` is the way in."""

from __future__ import annotations

from graphmem.serving.vllm.engine import ENGINE

__all__ = ["ENGINE"]
