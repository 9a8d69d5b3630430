"""A document as a piece of HTML among other cells of a notebook, which runs no script there: its curves are drawn here.
A run to look around in is a page in a frame of its own, without a way to what is around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from graphmem.reports import Format
from graphmem.reports.document import UNITS, Curve, Curves, Document, Moments, clean, section
from graphmem.reports.formats.html import COLOURS, SHARED, body
from graphmem.reports.formats.html import FORMAT as PAGE

_WIDTH, _HEIGHT = 960, 200
#: Of the frame, in pixels: the events and what they say, the rest by its own bar.
_FRAME = 700
#: Of the values behind one point of the plot the largest is drawn, so no peak is lost.
_POINTS = 960


_STYLE = """
.graphmem td { padding: .1em .6em .1em 0 !important } .graphmem td.name { min-width: 13em }
.graphmem .exact { display: none } .graphmem td.bar { position: relative }
.graphmem .edge { position: absolute; top: 0; bottom: 0; width: 2px; background: #cf3f4a }
.graphmem .verdict { border-left: 4px solid; padding-left: .7em; margin: .5em 0 } .graphmem p { margin: .25em 0 }
.graphmem .yes { border-color: #2f9e5a } .graphmem .no { border-color: #cf3f4a }
.graphmem .verdict p:first-child { font-weight: 650 }
""".strip()


class _Notebook(Format):
    name = "notebook"
    has_room = False

    def render(self, document: Document, width: int | None = None) -> str:
        """The sections; notebooks have rules for tables of their own, which are more special than those of a page."""
        style = f"{SHARED.format('.graphmem', ' !important')}\n{_STYLE}"
        return f'<div class="graphmem"><style>{style}</style>{body(document, _drawn)}</div>\n'


FORMAT = _Notebook()


def _drawn(block: Curves | Moments) -> str:
    if isinstance(block, Curves):
        return "" if block.brief else _curves(block)  # a line of a terminal; the run itself is below
    page = escape(PAGE.render(Document("events", "The run over its events", [section("", block)], dict)))
    style = f"width:100%;height:{_FRAME}px;border:0"
    return f'<iframe title="the run over its events" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def _curves(block: Curves) -> str:
    """Curves over time, and in words how high they go and where their limit is."""
    highest = max(float(np.max(curve.values)) for curve in block.curves) or 1.0
    words = UNITS[block.unit]
    lines, said = [], [f"up to {words(int(highest) if block.unit == 'bytes' else highest)}"]
    for number, curve in enumerate(block.curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(_points(curve, highest))
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        if curve.name:
            said.append(f'<span class="swatch" style="background:{colour}"></span>{escape(clean(curve.name))}')
    if block.limit is not None:
        said.append(escape(clean(f"{block.limit[1]}: {words(block.limit[0])}")))
    said += [escape(clean(words)) for words in (block.caption,) if words]
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:100%" role="img" aria-label="curves">'
    return f"{svg}{''.join(lines)}</svg><p>{'; '.join(said)}</p>"


def _points(curve: Curve, highest: float) -> Iterator[str]:
    values = np.asarray(curve.values)
    count = len(values)
    starts = np.unique(np.linspace(0, count, min(count, _POINTS), endpoint=False, dtype=np.int64))
    for start, value in zip(starts.tolist(), np.maximum.reduceat(values, starts).tolist(), strict=True):
        yield f"{_WIDTH * start / max(1, count - 1):.1f},{_HEIGHT - 2 - (_HEIGHT - 4) * value / highest:.1f}"
