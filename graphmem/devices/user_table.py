"""Cards that the user measured: a JSON file of rows like those of the table, which take precedence over it.

``graphmem calibrate`` writes it. It lies in ``$GRAPHMEM_DEVICES``, else in ``$XDG_CONFIG_HOME/graphmem/devices.json``,
else in ``~/.config/graphmem/devices.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphmem.base.documents import fits, read_json, shown
from graphmem.base.files import write_whole
from graphmem.errors import UsageError, first_line

_VARIABLE = "GRAPHMEM_DEVICES"
_NEEDED = {"name", "capacity_bytes", "compute_capability", "sm_count", "max_threads_per_sm", "context_bytes"}
#: The fields of a row and their types; other names are another version's and are left alone.
FIELDS: Mapping[str, Any] = {
    "name": str,
    "aliases": tuple[str, ...],
    "vendor": str,
    "capacity_bytes": int,
    "capacity_source": str,
    "capacity_assumed": bool,
    "compute_capability": tuple[int, int] | None,
    "sm_count": int,
    "max_threads_per_sm": int,
    "context_bytes": int,
    "context_source": str,
    "context_measured": bool,
    "unified_memory": bool,
    "cublas_workspace_bytes": int | None,
    "clocks_khz": tuple[int, int],
    "l2_cache_bytes": int | None,
    "memory_bandwidth": int | None,
    "boost_khz": int | None,
    "tensor_teraflops": float | None,
    "link_bandwidth": int | None,
    "is_server": bool,
    "empty_context_bytes": int,
    "empty_context_source": str,
    "board_bytes": int,
}
#: No card has more of anything than this, and a card has some memory.
_MOST = 1 << 50


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
        rows = read_json(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}; mend or remove it") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _NEEDED for row in rows):
        raise UsageError(f"{path} is not a list of cards; mend or remove it, and run 'graphmem calibrate' again")
    for row in rows:
        _check(row, path)
    return rows


def _check(row: Mapping[str, Any], path: Path) -> None:
    """Raises :class:`UsageError` for a value that no card has."""
    for name, kind in FIELDS.items():
        if name not in row:
            continue
        value = row[name]
        numbers = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
        if not fits(value, kind) or not all(0 <= number <= _MOST for number in numbers):
            card = row["name"] if isinstance(row["name"], str) else "a card"
            raise UsageError(
                f"{path}: {name} of {card!r} is {shown(value)}; mend or remove the file, or run 'graphmem calibrate' "
                "again"
            )
    if not row["name"].strip() or not row["capacity_bytes"]:
        raise UsageError(f"{path}: a card without a name or without memory; mend or remove the file")


def write_user_row(row: dict[str, Any]) -> Path:
    """Add a card, or replace the one of its name, and return the file's path. Raises :class:`UsageError`."""
    path = user_table_path()
    rows = [known for known in read_user_table() if known["name"] != row["name"]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    write_whole(path, json.dumps([*rows, row], indent=2) + "\n")
    return path
