"""A kind of recording: what records it, what predicts it. :mod:`tests.recorded.kinds` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.recorded import differ, record
from tests.recorded.case import Runner


class Kind(Protocol):
    """What ``python -m tests.recorded`` knows of a kind. Arguments are names, or parts of names, and options."""

    def record(self, arguments: list[str]) -> int:
        """Record anew, on a CUDA build. The exit status."""

    def table(self, arguments: list[str]) -> int:
        """Print how close the predictions are. The exit status."""

    def differ(self, arguments: list[str]) -> int:
        """Print where predictions leave the recordings. The exit status."""


@dataclass(frozen=True)
class Changes:
    """Cases whose recording is the bytes that they ask for and give back.

    ``run`` runs one on the CUDA build, ``predict`` gives the same bytes from a capture; ``wanted`` says which are
    recorded. ``folder`` has one file a group.
    """

    cases: Mapping[str, Any]
    folder: Path
    run: Runner
    predict: Callable[[Any], list[int]]
    wanted: Callable[[Any], bool] = lambda case: True

    def record(self, arguments: list[str]) -> int:
        cases = {name: case for name, case in self.cases.items() if self.wanted(case)}
        record.record_all(self.folder, cases, self.run, arguments)
        return 0

    def table(self, arguments: list[str]) -> int:
        differ.table(self.cases, self._recorded(), self.predict, arguments)
        return 0

    def differ(self, arguments: list[str]) -> int:
        parts = [part for part in arguments if part != "-v"]
        differ.show(self.cases, self._recorded(), self.predict, parts, "-v" in arguments)
        return 0

    def _recorded(self) -> dict[str, list[int]]:
        documents = record.load(self.folder)
        return {name: document["changes"] for name, document in documents.items() if "changes" in document}
