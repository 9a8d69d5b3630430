"""Cards that the user measured: a JSON file of rows like those of the table, which take precedence over it.

``graphmem calibrate`` writes it. It lies in ``$GRAPHMEM_DEVICES``, else in ``$XDG_CONFIG_HOME/graphmem/devices.json``,
else in ``~/.config/graphmem/devices.json``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from graphmem.errors import UsageError

_VARIABLE = "GRAPHMEM_DEVICES"
_NEEDED = {"name", "capacity_bytes", "compute_capability", "sm_count", "max_threads_per_sm", "context_bytes"}


def user_table_path() -> Path:
    """Where the user's cards are kept."""
    if given := os.environ.get(_VARIABLE):
        return Path(given)
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "graphmem" / "devices.json"


def read_user_table() -> list[dict[str, Any]]:
    """The rows of the file, none if there is no file. Raises :class:`UsageError` for a file that is damaged."""
    path = user_table_path()
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; mend or remove it") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _NEEDED for row in rows):
        raise UsageError(f"{path} is not a list of cards; mend or remove it, and run 'graphmem calibrate' again")
    return rows


def write_user_row(row: dict[str, Any]) -> Path:
    """Add a card, or replace the one of its name, and return the file's path. Raises :class:`UsageError`."""
    path = user_table_path()
    rows = [known for known in read_user_table() if known["name"] != row["name"]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([*rows, row], indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path
