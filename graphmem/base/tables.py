"""Tables in TOML and JSON, those that lie beside the modules that read them among them."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from graphmem.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(package: str, name: str) -> Any:
    """The table of a file of a package, of TOML or of JSON by the end of its name."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else parse_table(text)


def parse_table(text: str) -> dict[str, Any]:
    """The table of a text. Raises :class:`ValueError`."""
    return tomllib.loads(text)


def toml_in(path: Path) -> dict[str, Any]:
    """The table of a TOML file of the user's. Raises :class:`UsageError`."""
    from graphmem.base.documents import read_bounded

    try:
        with path.open("rb") as file:
            return parse_table(read_bounded(file).decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
