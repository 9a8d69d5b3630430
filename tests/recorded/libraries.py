"""Whole programs of libraries (:mod:`tests.recorded.cases.libraries`): functions, run as :mod:`tests.recorded.whole`
says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests import places
from tests.recorded.cases.libraries import CASES, Case
from tests.recorded.whole import WholePrograms

if TYPE_CHECKING:
    from graphmem.trace import Trace


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

    def trace(self, torch_version: tuple[int, int], library: str | None) -> tuple[Trace, Mapping[str, int]]:
        from graphmem.capture.session.session import capture
        from graphmem.cudnn.library import Cudnn
        from graphmem.runtimes.base import Setting
        from graphmem.runtimes.pytorch.runtime import RUNTIME
        from tests.recorded.device import CARD
        from tests.recorded.steps import runs

        setting = Setting(CARD, torch_version)
        with contextlib.ExitStack() as stack:
            captured = capture(
                lambda session: self.case.program(),
                source=self.name,
                device=CARD,
                torch_version=torch_version,
                data_dependent=1.0,
                memory=RUNTIME.live(RUNTIME.parse("", setting), setting, limited=False),
                cudnn=stack.enter_context(Cudnn(library, runs._card(CARD))) if library else None,
            )
        return captured.trace, captured.assumed


PROGRAMS = {name: LibraryProgram(case) for name, case in CASES.items()}
KIND = WholePrograms("libraries", places.PYTORCH / "libraries", lambda: PROGRAMS)
