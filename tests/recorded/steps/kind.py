"""Whole runs as kinds of recordings: without cuDNN's workspaces, compiled, and with other versions of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import places
from tests.recorded import stub
from tests.recorded.steps import differ, record, runs, table


@dataclass(frozen=True)
class Runs:
    """The runs of one folder, recorded in an ``environment``; ``cudnn``: with cuDNN's workspaces."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    cudnn: bool = False

    def record(self, arguments: list[str]) -> int:
        return record.record(arguments, self.folder, self.environment)

    def table(self, arguments: list[str]) -> int:
        return table.main(self._told(arguments))

    def differ(self, arguments: list[str]) -> int:
        return differ.main(self._told(arguments))

    def _told(self, arguments: list[str]) -> list[str]:
        return ["--folder", str(self.folder), *(["--cudnn"] if self.cudnn else []), *arguments]


STEPS = Runs(runs.FOLDER)
COMPILED = Runs(places.PYTORCH / "compiled", stub.REAL_CUDNN, cudnn=True)
