"""A room is well cut when it can be taken away: in a copy without some rooms the rest is importable and answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import places
from tests.support import onnx_samples

#: Rooms, and the commands that go with them.
ROOMS = {
    "serving": ("serve",),
    "planning/layouts": ("plan", "pack"),
    "accuracy": ("measure", "verify", "calibrate", "accuracy"),
}
#: Tests of the rest, of which these take seconds.
REST = ("tests/reports/test_reports.py", "tests/reports/test_html_report.py", "tests/core/test_devices.py")
#: Imports every module that is left; what the machine lacks is no fault of the rooms.
IMPORTS = """
import importlib, pkgutil
import graphmem

def left(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert not (error.name or "").startswith("graphmem"), (found.name, error)
            continue
        yield found.name
        if found.ispkg:
            yield from left(module)

names = {name for name in left(graphmem) if not name.startswith("graphmem.capture")}
assert len(names) > 100, len(names)
assert not [name for name in names if name.startswith(("graphmem.serving", "graphmem.accuracy"))]
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without the rooms, and the tests."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "golden", "recorded", "oracles")
    for name in ("graphmem", "tests"):
        shutil.copytree(places.ROOT / name, folder / name, ignore=ignored)
    for name in ("golden", "recorded"):
        (folder / "tests" / name).symlink_to(places.ROOT / "tests" / name)
    shutil.copy(places.ROOT / "pyproject.toml", folder)
    for room in ROOMS:
        shutil.rmtree(folder / "graphmem" / room)
    return folder


#: The finder of an editable installation would find what was taken away where it still is.
ALONE = "import sys; sys.meta_path = [one for one in sys.meta_path if 'editable' not in repr(one)]\n"


def python(copy: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "80"}
    command = [sys.executable, "-c", ALONE + program, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(copy, "from graphmem.cli.main import main; main()", *arguments)


@pytest.mark.slow
def test_what_is_left_is_importable(copy: Path) -> None:
    done = python(copy, IMPORTS)
    assert done.returncode == 0, done.stderr[-2000:]


def test_commands_are_there_with_their_rooms(copy: Path, tmp_path: Path) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    shown = run(copy, "--help")
    assert shown.returncode == 0, shown.stderr
    listed = {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ") and line.split()}
    gone = {command for commands in ROOMS.values() for command in commands}
    assert {"analyze", "run", "fit", "advise", "sweep", "compare", "gpus", "zoo"} <= listed
    assert not gone & listed
    done = run(copy, "sweep", model, "--vary", "batch=1,2", "--gpu", "T4", "--format", "markdown")
    assert done.returncode == 0, done.stderr
    assert "fits T4-16GB" in done.stdout
    refused = run(copy, "serve", "gpt2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "No such command 'serve'" in refused.stderr
    lacking = run(copy, "zoo", "analyze", "mlp")
    assert lacking.returncode == 1
    assert "this graphmem has no graphmem.accuracy" in lacking.stderr


@pytest.mark.slow
def test_the_tests_of_the_rest_are_green(copy: Path) -> None:
    done = python(copy, "import pytest; sys.exit(pytest.main(sys.argv[1:]))", "-p", "no:cacheprovider", *REST)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
