"""The estimate as JSON, for programs. All sizes are bytes; the document names its schema."""

from __future__ import annotations

from graphmem.estimate import Estimate


def render(estimate: Estimate) -> str:
    """The JSON document (schema ``graphmem.estimate/1``) as text ending in a newline."""
    return estimate.to_json() + "\n"
