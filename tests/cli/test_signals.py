"""Ctrl-C and SIGTERM: the program ends with the code of the signal, says one line, and leaves no temporary folder."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import graphmem
from graphmem.cli.endings import ENDINGS, Terminated, ending_in_order
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


#: Interrupts itself when so many modules have been imported since the program began.
_AT_IMPORT = """
import os, signal, sys
signal.signal(signal.{name}, signal.{before})
from graphmem.cli import start
left = {number}

def hook(event, arguments):
    global left
    left -= event == "import"
    if event == "import" and not left:
        os.kill(os.getpid(), signal.{name})

sys.argv = ["graphmem", "gpus", "T4"]
sys.addaudithook(hook)
start.main()
"""


def _interrupted_at_import(number: int, name: str, before: str) -> subprocess.CompletedProcess[str]:
    script = _AT_IMPORT.format(number=number, name=name, before=before)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("number", [1, 2, 25, 90, 190])
def test_a_signal_while_modules_are_imported_is_one_line(number: int, name: str, code: int) -> None:
    before = "default_int_handler" if name == "SIGINT" else "SIG_DFL"
    done = _interrupted_at_import(number, name, before)
    assert (done.returncode, done.stderr, done.stdout) == (code, "graphmem: interrupted\n", ""), number


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    done = _interrupted_at_import(25, "SIGHUP", "SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")
    assert "T4" in done.stdout


def test_handlers_are_those_of_before_a_command() -> None:
    before = [signal.getsignal(number) for number in ENDINGS]
    with ending_in_order():
        assert [signal.getsignal(number) for number in ENDINGS] != before
    assert [signal.getsignal(number) for number in ENDINGS] == before


@pytest.mark.parametrize("name", graphmem.__all__)
def test_a_public_name_is_found_whatever_was_imported_before(name: str) -> None:
    place = graphmem._PLACES[name]
    script = f"import graphmem, graphmem.{place}, types; assert not isinstance(graphmem.{name}, types.ModuleType)"
    if name in ("analyze", "Plan", "Estimate"):  # one of each kind in a process of its own
        subprocess.run([sys.executable, "-c", script], check=True)
    assert getattr(importlib.import_module(f"graphmem.{place}"), name) is getattr(graphmem, name)


def test_a_signal_in_the_callback_of_a_weak_reference_is_heard_all_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    class Storage:
        pass

    died: list[int] = []
    storage = Storage()

    def dies(_: object) -> None:
        died.append(1)
        signal.raise_signal(signal.SIGTERM)

    reference = weakref.ref(storage, dies)

    def end_it() -> None:
        nonlocal storage
        del storage
        time.sleep(5)

    with pytest.raises(Terminated), ending_in_order():
        end_it()
    assert (reference(), died) == (None, [1])
    assert capfd.readouterr().err == ""
