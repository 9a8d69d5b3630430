"""Hooks of the site: a link that leads out of ``docs`` becomes the name of its file, for the site has no page of it."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """The page with such links replaced."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", link[2]):
            return link[0]
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith(".."):
            return link[0]
        return f"{link[1]} (`{target.lstrip('./')}`)"

    return _LINK.sub(replaced, markdown)
