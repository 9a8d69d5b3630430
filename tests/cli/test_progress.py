"""While one waits: what is being done on a terminal, a bar of many answers; seldom a line in a pipe."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphmem.answering.runs import counted, labelled
from graphmem.cli.output import working
from graphmem.cli.progress import rate_words

_SCRIPT = """
import sys, time, click
from graphmem.cli import progress
from graphmem.cli.main import cli
progress.PATIENCE = {patience}
cli([{words}], prog_name="graphmem", standalone_mode=False)
"""
_MODEL = """
import logging, time, torch
def build(batch=2):
    time.sleep(0.3)
    logging.getLogger("transformers.modeling").warning("NOISE of a library")
    return torch.nn.Linear(8, 8), torch.zeros(batch, 8)
"""


def _script(folder: Path, *words: str, patience: float = 0) -> list[str]:
    (folder / "net.py").write_text(_MODEL)
    named = ", ".join(map(repr, words)).replace("MODEL", f"{folder / 'net.py'}:build")
    return [sys.executable, "-c", _SCRIPT.format(patience=patience, words=named)]


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_a_terminal_sees_a_bar_of_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import pty

    master, slave = pty.openpty()
    words = ("sweep", "MODEL", "--vary", "batch=2,3", "--gpu", "T4", "--no-cache")
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(
        _script(tmp_path, *words), stdin=slave, stdout=subprocess.DEVNULL, stderr=slave, env=environment
    )
    os.close(slave)
    said = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # Linux's end of a terminal
            break
        if not part:
            break
        said += part
    assert process.wait() == 0, said.decode()
    assert b"0/2" in said
    assert b"1/2" in said
    assert b"batch 3" in said
    assert b"NOISE" not in said


@pytest.mark.slow
def test_a_pipe_sees_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ("fit", "MODEL", "--gpu", "T4", "--at-most", "2", "--no-cache")
    done = subprocess.run(_script(tmp_path, *words), capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_libraries_are_heard_again_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    with working():
        logging.getLogger("transformers").warning("unheard")
        logging.getLogger("transformers").error("an error")
    logging.getLogger("transformers").warning("heard")
    assert [record.message for record in caplog.records] == ["an error", "heard"]


def test_only_who_counts_is_told_the_count() -> None:
    class Counting:
        counts: list[tuple[int, int]]

        def __init__(self) -> None:
            self.counts = []

        def __call__(self, stage: str) -> None: ...

        def count(self, done: int, total: int) -> None:
            self.counts.append((done, total))

    say = Counting()
    counted(say, 1, 3)
    counted(labelled(say, "a part"), 1, 2)  # of something longer
    counted(print, 1, 2)
    assert say.counts == [(1, 3)]


def test_rates_are_words() -> None:
    assert [rate_words(speed) for speed in (None, 0, 12.3, 0.25)] == ["", "", "12/s", "4 s each"]


@pytest.mark.parametrize(("silence", "printed"), [(0.0, "one\ntwo\n"), (30.0, "")])
def test_words_are_printed_seldom_where_there_is_no_terminal(
    silence: float, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("graphmem.cli.progress._SILENCE", silence)
    with working() as say:
        say("one")
        say("two")
    assert capsys.readouterr().err == printed
