"""A small share of the fuzz run, always the same: the cheap kinds in this process, each in a second or two."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("resource", reason="cases run within limits of time and memory that POSIX sets")

from tests.fuzz.judge import emptied, problem_of
from tests.fuzz.kinds import KINDS, make

#: Kind -> cases. Those that need PyTorch or draw figures run with ``python -m tests.fuzz`` alone.
SHARE = {"trace": 60, "report": 60, "devices": 60, "options": 60, "snapshot": 60, "numbers": 12, "onnx": 20,
         "onnx-values": 20, "onnx-external": 20, "gguf": 40, "load": 12}  # fmt: skip


@pytest.mark.parametrize("kind", SHARE)
def test_damaged_input_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    assert kind in KINDS
    for index in range(SHARE[kind]):
        case = make(kind, 5, index, emptied(tmp_path / "case"))
        problem, detail, _ = problem_of(case, emptied(tmp_path / "scratch"))
        assert not problem, f"python -m tests.fuzz --only {kind}:{index} --seed 5: {problem}: {detail}"


def test_a_case_is_the_same_again(tmp_path: Path) -> None:
    first, second = emptied(tmp_path / "a"), emptied(tmp_path / "b")
    make("trace", 5, 1, first), make("trace", 5, 1, second)
    assert (first / "trace.json").read_bytes() == (second / "trace.json").read_bytes()


def test_a_wrong_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphmem.planning import recordings

    case = make("trace", 5, 0, emptied(tmp_path / "case"))

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(recordings, "read_file", broken)
    assert problem_of(case, emptied(tmp_path / "scratch"))[0] == "bug"
