"""Whole programs of libraries (:mod:`tests.recorded.cases.libraries`): functions, run as :mod:`tests.recorded.whole`
says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests import places
from tests.recorded.cases.libraries import CASES, Case
from tests.recorded.whole import WholePrograms, captured

if TYPE_CHECKING:
    from graphmem.run import Run


@dataclass(frozen=True)
class LibraryProgram:
    """A case as a whole program: what it returns is what a script would still hold at its end."""

    case: Case

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def needs(self) -> tuple[str, ...]:
        return self.case.needs

    @property
    def compiles(self) -> bool:
        return self.case.compiles

    def run(self) -> Any:
        return self.case.program()

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        return captured(self.case.program, self.name, torch_version, library, data_dependent=1.0)


PROGRAMS = {name: LibraryProgram(case) for name, case in CASES.items()}
KIND = WholePrograms("libraries", places.PYTORCH / "libraries", lambda: PROGRAMS)
