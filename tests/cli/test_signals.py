"""Ctrl-C and SIGTERM: the program ends with the code of the signal, says one line, and leaves no temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support import platforms

#: Stands for a long call of onnxruntime: it waits in C until the file ``reached`` lies there, and longer.
_SLOW = """
import pathlib, signal, sys, time
import graphmem.runtimes.onnxruntime.optimizer as optimizer

def slow(onnxruntime, path, options, left_out=()):
    pathlib.Path({reached!r}).touch()
    optimizer.interruptible(lambda: time.sleep(60))

optimizer._session = slow
signal.signal(signal.SIGINT, signal.default_int_handler)
from graphmem.cli.main import main
sys.argv = ["graphmem", "analyze", {model!r}, "-b", "2", "-o", {output!r}]
main()
"""


@platforms.SIGNALS
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_analysis_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    pytest.importorskip("onnxruntime")
    model, temporary, output = tmp_path / "model.onnx", tmp_path / "temporary", tmp_path / "report"
    reached = tmp_path / "reached"
    temporary.mkdir()
    shape = ["batch", 8]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), model)
    script = _SLOW.format(reached=str(reached), model=str(model), output=str(output))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not reached.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert any(temporary.glob("graphmem-*"))
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert said == ""
    assert errors.strip() == "graphmem: interrupted"
    assert list(temporary.glob("graphmem-*")) == []
    assert not output.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["gpus"], ["gpus", "T4"], ["--help"], ["analyze", "--help"], ["--version"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "graphmem", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("graphmem: cannot write")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["gpus"], ["gpus", "T4"]])
def test_closed_standard_output_is_one_line(arguments: list[str]) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "graphmem", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "graphmem: standard output is closed; name a file with -o FILE"
