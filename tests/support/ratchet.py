"""Ratchets: files of what was reached, case by case, that predictions may improve on and never fall behind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entries = dict[str, Any]


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
    reached = {
        "allocated_error_bytes": compared.allocated_error_bytes,
        "reserved_error_bytes": compared.reserved_error_bytes,
        "matched": rounded(compared.match.share),
    }
    if update:
        write(path, read(path) | {name: reached})
        return
    before = read(path).get(name)
    assert before is not None, f"{name} has no entry in {path.name}; run pytest --update-goldens and review it"
    hint = f"see python -m tests.recorded {kind} differ {name}"
    for level in ("allocated_error_bytes", "reserved_error_bytes"):
        assert abs(reached[level]) <= abs(before[level]), f"{level} grew; {hint}"
    assert reached["matched"] >= before["matched"], f"fewer allocations match; {hint}"
