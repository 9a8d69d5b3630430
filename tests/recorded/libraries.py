"""Whole programs of libraries (:mod:`tests.recorded.cases.libraries`): functions, run as :mod:`tests.recorded.whole`
says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import places
from tests.recorded.cases.libraries import CASES
from tests.recorded.whole import CaseProgram, WholePrograms, captured

if TYPE_CHECKING:
    from graphmem.run import Run


class LibraryProgram(CaseProgram):
    """A case, in which masks select everything."""

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        return captured(self.case.program, self.name, torch_version, library, data_dependent=1.0)


PROGRAMS = {name: LibraryProgram(case) for name, case in CASES.items()}
KIND = WholePrograms("libraries", places.PYTORCH / "libraries", lambda: PROGRAMS)
