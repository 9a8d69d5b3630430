"""Ratchets: files of what was reached, case by case, that predictions may improve on and never fall behind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entries = dict[str, Any]
_LEVELS = ("allocated_error_bytes", "reserved_error_bytes")


def read(path: Path) -> Entries:
    """The entries by name; none where the file is not there yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, entries: Mapping[str, Any]) -> None:
    """One line an entry, so that a diff shows which moved."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def rounded(share: float) -> float:
    """A share of matched allocations as ratchets hold it: four digits, rounded down."""
    return math.floor(share * 10_000) / 10_000


def hold_run(path: Path, kind: str, name: str, compared: Any, update: bool) -> None:
    """Hold a whole run (``compared``: a comparison of ``tests.recorded.steps.runs``) to its entry, or write it."""
    _hold(path, kind, name, _errors(compared) | {"matched": rounded(compared.match.share)}, update)


def hold_peaks(path: Path, kind: str, name: str, compared: Any, update: bool) -> None:
    """The same for a run followed in other steps than it was recorded, of which only the peaks can be compared."""
    _hold(path, kind, name, _errors(compared), update)


def _errors(compared: Any) -> Entries:
    return {level: getattr(compared, level) for level in _LEVELS}


def _hold(path: Path, kind: str, name: str, reached: Entries, update: bool) -> None:
    if update:
        write(path, read(path) | {name: reached})
        return
    before = read(path).get(name)
    assert before is not None, f"{name} has no entry in {path.name}; run pytest --update-goldens and review it"
    hint = f"see python -m tests.recorded {kind} differ {name}"
    for level in _LEVELS:
        assert abs(reached[level]) <= abs(before[level]), f"{level} grew; {hint}"
    if "matched" in reached:
        assert reached["matched"] >= before["matched"], f"fewer allocations match; {hint}"
