"""The page around the HTML of a plan and of a serving engine: one file that needs nothing else."""

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
