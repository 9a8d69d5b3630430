"""TOML files of the user: tables, and the prices of cards in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphmem.base.documents import read_bounded
from graphmem.base.tables import parse_table
from graphmem.devices import device_named
from graphmem.errors import UsageError


def prices_in(path: Path) -> dict[str, float]:
    """The price of a card of each kind, by its full name. Raises :class:`UsageError`."""
    found = {}
    for name, price in toml_in(path).items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < 1e6:
            raise UsageError(f"{path}: the price of {name} is a number above 0, not {price!r}")
        found[device_named(name).name] = float(price)
    return found


def toml_in(path: Path) -> dict[str, Any]:
    """The table of a file. Raises :class:`UsageError`."""
    try:
        with path.open("rb") as file:
            return parse_table(read_bounded(file).decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
