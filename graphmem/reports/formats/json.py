"""The answer of a document as JSON, for programs: it names its schema, and sizes are bytes."""

from __future__ import annotations

import json

from graphmem.reports import Format
from graphmem.reports.document import Document


class _Json(Format):
    name = "json"
    suffixes = (".json",)

    def render(self, document: Document, width: int | None = None) -> str:
        """Indented text."""
        return json.dumps(document.data(), indent=2) + "\n"


FORMAT = _Json()
