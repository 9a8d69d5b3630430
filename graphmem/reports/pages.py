"""The frame of a self-contained HTML page: of a plan, of a serving engine, and in a notebook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_STYLE = (
    "body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 } "
    "td, th { padding: .15em .9em .15em 0; text-align: left } td.n { text-align: right; white-space: nowrap } "
    "td.bar div { background: #0072b2; height: .8em } pre { background: #f4f4f4; padding: .6em; overflow-x: auto } "
    ".wide { overflow-x: auto } .no { color: #b00020; font-weight: 600 } .yes { font-weight: 600 } "
    "svg { max-width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #555 }"
)


def page(title: str, body: str, element: str, document: Mapping[str, Any]) -> str:
    """The page of this title and body, both of them HTML; the document as JSON is in ``element``."""
    data = json.dumps(document).replace("<", "\\u003c")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{body}"
        f"<script type='application/json' id={element}>{data}</script></html>\n"
    )


#: Notebooks have rules for tables of their own, which are more special than these.
_IN_NOTEBOOK = (
    ".graphmem td, .graphmem th { text-align: left !important } "
    ".graphmem td.n, .graphmem th.n { text-align: right !important; white-space: nowrap } "
    ".graphmem .swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em } "
    ".graphmem td.bar div { background: #0072b2; height: .8em } .graphmem .wide { overflow-x: auto } "
    ".graphmem .no { color: #b00020; font-weight: 600 } .graphmem .yes { font-weight: 600 } "
    ".graphmem svg { max-width: 100%; height: auto }"
)


def notebook(body: str) -> str:
    """HTML among other cells."""
    return f'<div class="graphmem"><style>{_IN_NOTEBOOK}</style>{body}</div>'
