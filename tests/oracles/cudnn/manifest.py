"""The manifest: which questions the trees of every family are grown from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracles.cudnn.ask import RECORDED, Batch
from tests.oracles.cudnn.grow import Parameters
from tests.oracles.cudnn.shapes import KINDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = Path(__file__).with_name("manifest.toml")


@dataclass(frozen=True)
class Family:
    """The trees of one file: the card that is asked for, and convolutions by kind."""

    name: str
    card: str
    grown: dict[str, int]
    largest: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """Versions, parameters and counts."""

    cudnn: str
    scikit_learn: str
    batch: int
    trees: Parameters
    kept: dict[str, int]
    kept_largest: dict[str, int]
    families: dict[str, Family]

    def grown_batches(self, family: Family) -> Iterator[Batch]:
        """What a family's trees are grown from."""
        for counts, largest in ((family.grown, False), (family.largest, True)):
            for kind, count in counts.items():
                yield from self._batches(family, kind, "grown", count, largest)

    def kept_batches(self, family: Family) -> Iterator[Batch]:
        """What they are measured with, and never grown on."""
        for kind in (kind for kind in self.kept if kind in family.grown):
            yield from self._batches(family, kind, "kept", self.kept[kind], False)
        for kind, count in (self.kept_largest if family.largest else {}).items():
            yield from self._batches(family, kind, "kept", count, True)
        yield Batch(family.card, RECORDED, "kept", 1, 0)

    def _batches(self, family: Family, kind: str, purpose: str, count: int, largest: bool) -> Iterator[Batch]:
        for number, begin in enumerate(range(0, count, self.batch), 1):
            yield Batch(family.card, kind, purpose, number, min(self.batch, count - begin), largest)


def read_manifest(path: Path = MANIFEST) -> Manifest:
    """The manifest of a file. Raises ``ValueError`` for a kind that :mod:`shapes` does not draw."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    families = {name: Family(name, **table) for name, table in tables["family"].items()}
    kept, kept_largest = tables["kept"], tables.get("kept_largest", {})
    for counts in (kept, kept_largest, *(counts for one in families.values() for counts in (one.grown, one.largest))):
        _check_kinds(counts)
    return Manifest(
        tables["cudnn"], tables["scikit-learn"], tables["batch"], Parameters(**tables["trees"]), kept, kept_largest,
        families,
    )  # fmt: skip


def _check_kinds(counts: dict[str, Any]) -> None:
    unknown = sorted(set(counts) - set(KINDS))
    if unknown:
        raise ValueError(f"no kind of layers is called {', '.join(unknown)}; there are {', '.join(KINDS)}")
