"""The trace as JSON, which ``graphmem replay`` reads."""

from __future__ import annotations

from graphmem.estimate import Estimate
from graphmem.exports import Asked, trace_of
from graphmem.trace import to_json


class Json:
    name = "json"
    suffixes = (".json",)
    is_binary = False

    def render(self, estimate: Estimate, asked: Asked) -> str:
        """Schema ``graphmem.trace``."""
        return to_json(trace_of(estimate)) + "\n"


EXPORT = Json()
