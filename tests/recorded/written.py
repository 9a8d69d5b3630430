"""Loops written by hand (:mod:`tests.recorded.cases.written`), recorded as :mod:`tests.recorded.whole` says, and
predicted by the built-in step with the options that ask for the same, as ``graphmem analyze`` predicts it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests import places
from tests.recorded.cases.written import CASES, source_of
from tests.recorded.whole import CaseProgram, WholePrograms

if TYPE_CHECKING:
    from graphmem.run import Run

#: The card that the recordings are made on.
_CARD = "H200-141GB"


class WrittenLoop(CaseProgram):
    """A case, predicted by the built-in step."""

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        from graphmem.answering import runs
        from graphmem.answering.question import Question
        from graphmem.training import Training

        with tempfile.TemporaryDirectory() as folder:
            given = self.case.given
            source, inputs = (source_of(self.case, Path(folder)), None) if given is None else given()
            question = Question(
                source,
                example_inputs=inputs,
                batch=self.case.batch if given is None else None,
                seq_len=self.case.seq_len,
                training=Training(**self.case.step),
                iterations=self.case.iterations,
                device=_CARD,
                torch_version=".".join(map(str, torch_version)),
                cudnn=library or "never",
            )
            return runs.record(question, runs.load(question))


PROGRAMS = {name: WrittenLoop(case) for name, case in CASES.items()}
KIND = WholePrograms("written", places.PYTORCH / "written", lambda: PROGRAMS)
