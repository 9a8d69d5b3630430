"""Real shells complete graphmem's words at a terminal, set up by the lines that the documentation gives. One that is
not installed is skipped."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import places

_FILE = places.ROOT / "docs" / "VIEWERS.md"
if not _FILE.exists():
    pytest.skip("an installed package has no such page beside it", allow_module_level=True)
_PAGE = _FILE.read_text(encoding="utf-8")
_BASH, _FISH = (
    re.search(pattern, _PAGE) for pattern in (r'`(eval "\$.*bash_source.*")`', r"`(_GRAPH.*fish_source.*)`")
)
assert _BASH is not None
assert _FISH is not None
#: Shell -> its command without anybody's settings, and the lines of its set-up.
_SHELLS = {
    "bash": ("bash --norc --noprofile -i", [_BASH[1]]),
    "zsh": ("zsh -f -i", ["autoload -Uz compinit; compinit -u -D", _BASH[1].replace("bash_source", "zsh_source")]),
    "fish": ("fish --no-config -i", [_FISH[1]]),
}
_SECONDS = 60


class _Terminal:
    """A shell at a terminal: what it wrote, without colours and movements."""

    def __init__(self, command: str, home: Path) -> None:
        self.written = ""
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            bin_folder = f"{home}{os.pathsep}{os.environ['PATH']}"
            settings = {"HOME": str(home), "TERM": "xterm", "PS1": "> ", "PATH": bin_folder}
            os.execvpe(command.split()[0], command.split(), {**os.environ, **settings})

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def shows(self, text: str) -> bool:
        """Whether the text is written within a minute."""
        until = time.monotonic() + _SECONDS
        while text not in self.written and time.monotonic() < until:
            if select.select([self.terminal], [], [], 0.1)[0]:
                self._read(os.read(self.terminal, 65_536).decode(errors="replace"))
        return text in self.written

    def _read(self, found: str) -> None:
        if "\x1b[c" in found or "\x1b[0c" in found:
            self.type("\x1b[?62c")  # fish waits for a terminal to say what it is
        self.written += re.sub(
            r"\x1b\[[0-9;?>=]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07|[\r\x08]", "", found
        )

    def close(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.terminal)


@pytest.fixture
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Terminal]:
    command, lines = _SHELLS[request.param]
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    program = tmp_path / "graphmem"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={places.ROOT} exec {sys.executable} -m graphmem "$@"\n')
    program.chmod(0o755)
    shell = _Terminal(command, tmp_path)
    try:
        for line in lines:
            shell.type(f"{line}\n")
        shell.type("echo set-''up\n")
        assert shell.shows("set-up"), shell.written
        shell.written = ""
        yield shell
    finally:
        shell.close()


@pytest.mark.parametrize("terminal", _SHELLS, indirect=True)
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("graphmem calib", "graphmem calibrate"),
        ("graphmem analyze --checkpoint-act", "--checkpoint-activations"),
        ("graphmem analyze zoo:bert-ba", "graphmem analyze zoo:bert-base"),
        ("graphmem analyze m.onnx --gpu RTX-3060-1", "--gpu RTX-3060-12GB"),
        ("graphmem fit zo", "graphmem fit zoo:"),
    ],
)
def test_a_shell_completes(terminal: _Terminal, typed: str, completed: str) -> None:
    terminal.type(f"{typed}\t")
    assert terminal.shows(completed), terminal.written
