"""How far predictions were off, by their cause: ``python -m tests.recorded.spreads [part ...]``.

Writes ``graphmem/answering/causes/measured.json``, which the intervals of reports are made of. Needs no CUDA build:
recordings that are committed are compared. With parts of names only their rows are made anew.

- ``networks``: how far predicted workspaces of cuDNN move peaks. ``python -m tests.oracles.cudnn networks`` measures
  them, and needs cuDNN.
- ``versions``: steps that were recorded with two releases of PyTorch, neighbours among those recorded. A row is (step,
  older, newer, change of the allocated peak, change of the reserved peak), as parts of the older.
- ``programs``: how far recorded whole programs were off, with the diagnostics that nothing bounds, and ``shortened``:
  those of several runs, or with batches of many sizes, of which a few steps were predicted. A row of these is (program,
  change of the allocated peak, of the reserved peak), from what was predicted to what was recorded. ``python -m
  tests.recorded.verdicts`` writes both.
- ``cards``: how far language models that others measured on real cards were from their predictions, as the accuracy
  report (``reports/accuracy.md``) has them.

The records of ``models_zoo/measured`` are not among them: with those the accuracy report tests the intervals.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphmem
from tests import places

TARGET = Path(graphmem.__file__).parent / "answering" / "causes" / "measured.json"
COMMAND = "python -m tests.recorded.spreads"
_STEP = ".json.gz"


def main(parts: list[str]) -> None:
    """Measure the versions of the steps that are named, or of all, and write the file."""
    document = _read()
    kept = [row for row in document["versions"] if parts and not _is_named(row[0], parts)]
    document["versions"] = sorted([*kept, *_versions(parts)])
    document["cards"] = sorted(_cards())
    write(document)


def replace_rows(kind: str, name: str, rows: list[list[Any]]) -> None:
    """Write the file with other rows of that kind and first name, or of all names where none is given."""
    document = _read()
    kept = [row for row in document.get(kind, []) if name and row[0] != name]
    write({**document, kind: sorted([*kept, *rows])})


def _read() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
    return document


def _is_named(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


def write(document: dict[str, Any]) -> None:
    """One line a row, so that a diff shows which moved."""
    lines = [f'"command": {json.dumps(COMMAND)}']
    for name in ("networks", "versions", "programs", "cards", "shortened"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in document.get(name, []))
        lines.append(f'"{name}": [\n{rows}\n]')
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _versions(parts: list[str]) -> Iterator[list[Any]]:
    for older, newer in itertools.pairwise(places.RECORDED):
        before, after = places.of_torch(older) / "steps", places.of_torch(newer) / "steps"
        for path in sorted(before.glob(f"*{_STEP}")):
            if (after / path.name).exists() and _is_named(path.name, parts):
                first, second = (_peaks(folder / path.name) for folder in (before, after))
                changes = [round(new / old - 1, 6) for old, new in zip(first, second, strict=True)]
                yield [path.name.removesuffix(_STEP), before.parent.name, after.parent.name, *changes]


#: Programs of ``models_zoo/published`` that train or run whole language models.
_LANGUAGE_MODELS = ("cs336_", "gpt_from_scratch ", "sdpa_benchmark ", "xmem_language ")
_CASE = re.compile(r"\| (?P<case>[^|]+) \| (?P<level>allocated|reserved) \|(?:[^|]+\|){3} (?P<error>[-+][\d.]+) % \|")


def _cards() -> Iterator[list[Any]]:
    """Rows of the accuracy report; an error there is a part of what was measured, here of what was predicted."""
    for line in (places.ROOT / "reports" / "accuracy.md").read_text(encoding="utf-8").splitlines():
        found = _CASE.match(line)
        if found and found["case"].startswith(_LANGUAGE_MODELS):
            yield [found["case"], found["level"], round(1 / (1 + float(found["error"]) / 100) - 1, 6)]


def _peaks(path: Path) -> tuple[int, int]:
    document = json.loads(gzip.decompress(path.read_bytes()))
    return document["allocated_peak"], document["reserved_peak"]


if __name__ == "__main__":
    main(sys.argv[1:])
