"""A document as Markdown: for an issue, a pull request, a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from graphmem.reports import Format
from graphmem.reports.document import Block, Code, Curves, Document, Facts, Items, Shares, Table, Text, clean


class _Markdown(Format):
    name = "markdown"
    suffixes = (".md", ".markdown")
    has_room = False

    def render(self, document: Document, width: int | None = None) -> str:
        """A heading a section; tables as pipes. Curves are left out, for want of a way to draw them."""
        parts = [f"# {_escaped(document.title)}"]
        for section in document.sections:
            blocks = [part for block in section.blocks if (part := "\n".join(_block(block)))]
            if section.title and (blocks or not section.blocks):
                parts.append(f"## {_escaped(section.title)}")
            parts += blocks
        return "\n\n".join(parts) + "\n"


FORMAT = _Markdown()


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        mark = "**" if block.tone else ""
        yield "\n\n".join(f"{mark}{_escaped(line)}{mark}" for line in block.lines if line)
    elif isinstance(block, Items):
        yield from (f"- {_escaped(line)}" for line in block.lines)
    elif isinstance(block, Facts):
        yield from _table(("", ""), ("---", "---"), block.rows)
    elif isinstance(block, Shares):
        yield from _block(block.table())
    elif isinstance(block, Table):
        rules = ["---:" if column.has_figures else "---" for column in block.columns]
        yield from _table([column.title for column in block.columns], rules, block.words())
    elif isinstance(block, Curves):
        yield "" if block.brief else _escaped(block.caption)
    elif isinstance(block, Code):
        fence = "`" * (3 + max((len(run) for run in re.findall("`+", block.text)), default=0))
        yield from (f"**{_escaped(block.name)}**", "", fence, *map(clean, block.text.splitlines()), fence)


def _table(titles: Sequence[str], rules: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in (titles, rules))
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    inner = text.lstrip(" ")
    return ("&emsp;" if inner != text else "") + _escaped(inner)


def _escaped(text: str) -> str:
    """Text of users is no markup."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", clean(text))
