"""A question that a process of its own answers: the document, errors of the user's code, and one that dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphmem.errors import SourceError
from graphmem.sources.own_process import answer_of

_PROGRAM = """
import os, sys
from graphmem.errors import SourceError
from graphmem.sources.own_process import answer

def step(asked):
    if asked["how"] == "refuses":
        raise SourceError("give a batch")
    if asked["how"] == "raises":
        raise ValueError("no such layer")
    if asked["how"] == "dies":
        raise SystemExit("no library")
    return {"variable": os.environ["ASKED_FOR"], "how": asked["how"]}

answer(step, sys.argv, lambda error: f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("how", "document"),
    [
        ("answers", {"variable": "yes", "how": "answers"}),
        ("refuses", {"error": "give a batch"}),
        ("raises", {"error": "model.py: ValueError: no such layer"}),
        ("dies", None),
    ],
)
def test_an_answer_or_an_error_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, document: dict[str, str] | None
) -> None:
    (tmp_path / "answering_program.py").write_text(_PROGRAM, encoding="utf-8")
    paths = filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    asked = {"text": "model.py", "how": how}
    if document is not None:
        assert answer_of("answering_program", asked, "it failed", ASKED_FOR="yes") == document
        return
    with pytest.raises(SourceError, match=r"^it failed: no library$"):
        answer_of("answering_program", asked, "it failed", ASKED_FOR="yes")
