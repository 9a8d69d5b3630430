"""What a program sees of parameters and buffers after their module is converted, on the CUDA build and in a capture:
:mod:`tests.recorded.cases.conversions`.

``conversions.json.gz`` has for every module and method what was seen, a line each.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

from tests import places
from tests.recorded.cases.conversions import Seen, everything

GOLDEN = places.PYTORCH / "conversions.json.gz"


def recorded() -> dict[str, Seen]:
    """What was seen, by ``module.method``."""
    documents: dict[str, Seen] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return documents


def predict(parts: list[str]) -> dict[str, Seen]:
    """The same, as a capture shows it, of names that contain one of the parts."""
    from graphmem.capture.session.session import capture
    from tests.recorded.device import CARD, TORCH_VERSION

    found: dict[str, Seen] = {}
    capture(lambda _: found.update(everything(parts)), source="conversions", device=CARD, torch_version=TORCH_VERSION)
    plain: dict[str, Seen] = json.loads(json.dumps(found))
    return plain


def differences(truth: Seen, said: Seen) -> dict[str, tuple[Any, Any]]:
    """(recorded, predicted) of every fact that differs, by its path."""
    ours, theirs = dict(_facts(said)), dict(_facts(truth))
    return {
        path: (theirs.get(path), ours.get(path))
        for path in sorted(theirs.keys() | ours.keys())
        if theirs.get(path) != ours.get(path)
    }


def _facts(seen: Any, path: str = "") -> Any:
    if not isinstance(seen, dict):
        yield path, seen
        return
    for name, value in seen.items():
        yield from _facts(value, f"{path}.{name}" if path else name)


class Conversions:
    """The kind."""

    def record(self, arguments: list[str]) -> int:
        documents = recorded() if arguments else {}
        documents.update(everything(arguments))
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(documents[name])}" for name in sorted(documents))
        GOLDEN.write_bytes(gzip.compress(f"{{\n{lines}\n}}\n".encode(), 9, mtime=0))
        print(len(documents))
        return 0

    def table(self, arguments: list[str]) -> int:
        truth, said = recorded(), predict(arguments)
        differing = [name for name, seen in said.items() if differences(truth[name], seen)]
        print(f"{len(said)} conversions, {len(said) - len(differing)} equal")
        print(*differing, sep="\n")
        return 0

    def differ(self, arguments: list[str]) -> int:
        truth = recorded()
        for name, seen in predict(arguments).items():
            for path, (theirs, ours) in differences(truth[name], seen).items():
                print(f"{name}: {path}: recorded {theirs}, predicted {ours}")
        return 0


KIND = Conversions()
