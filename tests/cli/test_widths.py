"""The width of a terminal is the user's, and may be anything: reports are printed all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from graphmem.trace import to_json
from tests.cli.test_replay import small_trace

_WIDTHS = ("20", "1", "0", "-5", "abc", "1000000000", "²")
#: One process for all widths: commands as they are on the command line, each between two lines of its own.
_SCRIPT = """
import os, sys
from graphmem.cli import progress
from graphmem.cli.main import cli
progress.PATIENCE = 0
for width in {widths!r}:
    os.environ["COLUMNS"] = width
    for arguments in {commands!r}:
        try:
            cli(arguments, prog_name="graphmem", standalone_mode=False)
        except BaseException as error:
            print("BROKEN", width, arguments, repr(error))
            raise
print("DONE")
"""


def _commands(folder: Path) -> list[list[str]]:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / "m.onnx")
    (folder / "t.json").write_text(to_json(small_trace()))
    serve = ["serve", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--enforce-eager", "--no-advice"]
    return [["analyze", str(folder / "m.onnx")], ["replay", str(folder / "t.json")], serve, ["gpus"], ["gpus", "T4"]]


def _script(folder: Path) -> list[str]:
    return [sys.executable, "-c", _SCRIPT.format(widths=_WIDTHS, commands=_commands(folder))]


def test_any_width_in_a_pipe(tmp_path: Path) -> None:
    done = subprocess.run(_script(tmp_path), capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.stdout.rstrip().endswith("DONE"), done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_any_width_on_a_terminal(tmp_path: Path) -> None:
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(_script(tmp_path), stdin=slave, stdout=slave, stderr=slave)
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
    os.close(master)
    assert process.wait() == 0, said[-2000:]
    assert b"DONE" in said
    assert b"Traceback" not in said


def test_a_pipe_has_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    model = _commands(tmp_path)[0]
    command = [sys.executable, "-m", "graphmem", *model, "--details"]
    widths = {}
    for columns in ("60", "80", "110", "many"):
        environment = {**os.environ, "COLUMNS": columns}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=True)
        assert "\x1b" not in done.stdout
        widths[columns] = max(map(len, done.stdout.splitlines()))
    assert widths["60"] <= 60 < widths["80"] <= 80 < widths["110"] <= 110
    assert widths["many"] == widths["80"]
