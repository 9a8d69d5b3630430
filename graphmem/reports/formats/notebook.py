"""A document as a piece of HTML among other cells of a notebook."""

from __future__ import annotations

from graphmem.reports import Format
from graphmem.reports.document import Document
from graphmem.reports.formats.html import SHARED, body


class _Notebook(Format):
    name = "notebook"
    has_room = False

    def render(self, document: Document, width: int | None = None) -> str:
        """The sections; notebooks have rules for tables of their own, which are more special than those of a page."""
        style = SHARED.format(".graphmem", " !important")
        return f'<div class="graphmem"><style>{style}</style>{body(document)}</div>\n'


FORMAT = _Notebook()
