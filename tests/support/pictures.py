"""What a terminal shows, as an SVG picture."""

from __future__ import annotations

import io
import re

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text


def picture(shown: str, title: str, identity: str, width: int = 82) -> str:
    """Text with the escape sequences of a terminal; without the font that rich would have fetched."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=plain, unique_id=identity)
