"""Whether recordings made again are the same: ``python -m tests.recorded.same GOLDENS AGAIN``.

Compares every file of the two folders that differs, line by line or as one document. Frees that follow each other may
change places: some programs free what a dictionary ordered by address holds. Of whole runs the seconds and what newer
recordings leave out are not compared. Exits 1 if anything else differs.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

_TEXTS = (".json.gz", ".jsonl.gz")
#: Of a document of one run: what time and other recorders leave.
_PASSING = {"seconds", "params"}


def main(goldens: str, again: str) -> int:
    equal = ordered = different = 0
    for path in sorted(Path(again).rglob("*.gz")):
        before = Path(goldens) / path.relative_to(again)
        if not path.name.endswith(_TEXTS):
            continue  # models, which are questions; snapshots, which have addresses and stack frames
        if not before.exists():
            print(f"new: {path.relative_to(again)}")
        else:
            for name, one, other in _pairs(before, path):
                if one == other:
                    equal += 1
                elif _settled(one) == _settled(other):
                    ordered += 1
                else:
                    different += 1
                    print(f"different: {path.relative_to(again)} {name}", flush=True)
    print(f"{equal} recordings equal, {ordered} but for the order of frees, {different} different")
    return int(different > 0)


def _pairs(before: Path, after: Path) -> list[tuple[str, Any, Any]]:
    """Name, recording before and after: the whole file, or its lines by case or place."""
    texts = [gzip.decompress(path.read_bytes()).decode() for path in (before, after)]
    if not before.name.endswith(".jsonl.gz"):
        documents = [_lasting(json.loads(text)) for text in texts]
        return [("", *documents)]
    one, other = ({_name(i, line): line for i, line in enumerate(map(json.loads, text.splitlines()))} for text in texts)
    return [(name, one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])]


def _name(index: int, line: dict[str, Any]) -> str:
    return str(line.get("case", index))


def _lasting(document: Any) -> Any:
    if isinstance(document, dict):
        return {key: value for key, value in document.items() if key not in _PASSING}
    return document


def _settled(recording: Any) -> Any:
    """The recording with every row of frees in order, and of the allocator's own events what, and how much."""
    if not isinstance(recording, dict):
        return recording
    key = next((key for key in ("changes", "events", "trace") if key in recording), None)
    if key is None:
        return recording
    settled: list[Any] = []
    frees: list[Any] = []
    for event in recording[key]:
        if key == "trace":
            event = [event[0], event[2]]
        if _is_free(event):
            frees.append(event)
        else:
            settled += [*sorted(frees), event]
            frees = []
    return recording | {key: [*settled, *sorted(frees)]}


def _is_free(event: Any) -> bool:
    first = event[0] if isinstance(event, list) else event
    return first.startswith("free") if isinstance(first, str) else first < 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
