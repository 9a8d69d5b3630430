"""How far predictions were off, by their cause: ``python -m tests.recorded.spreads [plans|versions [part ...]]``.

Writes ``graphmem/causes/measured.json``, which the intervals of reports are made of. Needs no CUDA build: recordings
that are committed are predicted again, on cuDNN's trees, and compared. With parts of names only their rows are made
anew.

- ``plans``: everyday programs and programs of libraries in which a cuDNN plan was predicted. A row is (name, change of
  the allocated peak, change of the reserved peak) once cuDNN is asked, as parts of what is predicted without it. What
  is reached with cuDNN asked is in the ratchets; the rest of it has other causes. An hour.
- ``versions``: steps that were recorded with two releases of PyTorch, neighbours among those recorded. A row is (step,
  older, newer, change of the allocated peak, change of the reserved peak), as parts of the older.

The records of ``models_zoo/measured`` are not among them: with those the accuracy report tests the intervals.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphmem
from tests import places
from tests.support import ratchet

TARGET = Path(graphmem.__file__).parent / "causes" / "measured.json"
COMMAND = "python -m tests.recorded.spreads"
_STEP = ".json.gz"


def main(arguments: list[str]) -> None:
    """Measure what the arguments name, or all, and write the file."""
    document = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    document["command"] = COMMAND
    wanted, parts = arguments[:1], arguments[1:]
    for kind, measure in (("plans", _plans), ("versions", _versions)):
        if not wanted or kind in wanted:
            kept = [row for row in document.get(kind, []) if parts and not _is_named(row[0], parts)]
            document[kind] = sorted([*kept, *measure(parts)])
    write(document)


def _is_named(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


def write(document: dict[str, Any]) -> None:
    """One line a row, so that a diff shows which moved."""
    lines = [f'"command": {json.dumps(document["command"])}']
    for name in ("plans", "versions"):
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


def _peaks(path: Path) -> tuple[int, int]:
    document = json.loads(gzip.decompress(path.read_bytes()))
    return document["allocated_peak"], document["reserved_peak"]


def _plans(parts: list[str]) -> Iterator[list[Any]]:
    asked = {kind: ratchet.read(places.PYTORCH / f"{kind}_ratchet.json") for kind in ("everyday", "libraries")}
    for name, compared in _compared(parts):
        print(name, compared.predicted.trace.predicted_plans, file=sys.stderr, flush=True)
        if compared.predicted.trace.predicted_plans:
            kind, _, program = name.partition("/")
            reached, predicted = asked[kind][program], compared.predicted.replay
            allocated = reached["allocated_error_bytes"] - compared.allocated_error_bytes
            reserved = reached["reserved_error_bytes"] - compared.reserved_error_bytes
            changes = (allocated / predicted.peak_allocated_bytes, reserved / predicted.peak_reserved_bytes)
            yield [name, *(round(change, 6) for change in changes)]


def _compared(parts: list[str]) -> Iterator[tuple[str, Any]]:
    """Predictions on the trees, those that fail left out with their reason."""
    from tests.recorded import everyday, libraries

    os.environ.pop("GRAPHMEM_CUDNN", None)
    wholes = ((everyday.KIND, everyday.programs()), (libraries.KIND, libraries.PROGRAMS))
    for kind, programs in wholes:
        for name in kind.recorded():
            if not _is_named(f"{kind.kind}/{name}", parts):
                continue
            try:
                yield f"{kind.kind}/{name}", kind.compare(programs[name], None)
            except Exception as error:
                print(f"{kind.kind}/{name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
