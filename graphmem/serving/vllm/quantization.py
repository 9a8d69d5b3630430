"""Quantised weights as they lie in the engine's memory."""

from __future__ import annotations

from graphmem.errors import UsageError
from graphmem.serving.base import Question
from graphmem.serving.vllm.layers import LinearMethod, Unquantized


def method_for(question: Question, itemsize: int) -> tuple[LinearMethod, str | None]:
    """How linear layers keep their weights, and the engine's name of it (None: unquantised)."""
    own = question.model.config.get("quantization_config")
    if own or question.quantization:
        raise UsageError("quantised weights are not followed yet")
    return Unquantized(itemsize), None
