"""Tables in TOML, those that lie beside the modules that read them among them."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(package: str, name: str) -> dict[str, Any]:
    """The table of a file of a package."""
    return parse_table(files(package).joinpath(name).read_text(encoding="utf-8"))


def parse_table(text: str) -> dict[str, Any]:
    """The table of a text. Raises :class:`ValueError`."""
    return tomllib.loads(text)
