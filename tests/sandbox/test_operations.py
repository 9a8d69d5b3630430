"""Each operation on files in each mechanism: the real files stay, and the program sees what it would really see."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphmem.sandbox import MECHANISMS
from tests.places import ROOT
from tests.sandbox import operations

PROGRAM = Path(operations.__file__)


def outside(**more: str) -> dict[str, str]:
    """The environment of a process that finds these tests."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, **more}


def fly(
    mechanism: str, program: Path, folder: Path, attempts: int = 1, **permissions: Any
) -> tuple[str, dict[str, Any]]:
    """What a program prints in a sandbox, and the report. Skips where the machine forbids the mechanism."""
    report = folder.parent / f"{folder.name}-{mechanism}.json"
    command = [sys.executable, "-m", "tests.sandbox.flight", mechanism, str(program), str(report), str(attempts)]
    environment = {**outside(), "PERMISSIONS": json.dumps(permissions)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if f"GRAPHMEM_SANDBOX={mechanism}" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(report.read_text())


def really(program: Path, folder: Path) -> str:
    """What a program prints without a sandbox."""
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env=outside(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def sums(folder: Path) -> dict[str, Any]:
    """Contents, permissions and times of all that is in a folder."""
    found = operations.look(str(folder))
    return {name: (one, os.lstat(folder / name).st_mtime_ns) for name, one in found.items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    for name in operations.OPERATIONS:
        operations.prepare(folder / name)
    return folder


@pytest.fixture(scope="module")
def told(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    copy = tmp_path_factory.mktemp("copies") / "copy"
    shutil.copytree(prepared, copy, symlinks=True)
    return _by_operation(really(PROGRAM, copy))


def _by_operation(printed: str) -> dict[str, Any]:
    return {name: (result, seen) for name, result, seen in map(json.loads, printed.splitlines())}


def _difference(name: str, here: tuple[str, dict[str, Any]], there: tuple[str, dict[str, Any]]) -> str:
    seen = [f"{path}: {here[1].get(path)}, really {there[1].get(path)}" for path in {**here[1], **there[1]}
            if here[1].get(path) != there[1].get(path)]  # fmt: skip
    return "\n  ".join([f"{name}: {here[0]}", f"really: {there[0]}", *seen])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_operation_is_seen_and_harms_nothing(mechanism: str, prepared: Path, told: dict[str, Any]) -> None:
    before = sums(prepared)
    printed, report = fly(mechanism, PROGRAM, prepared)
    assert sums(prepared) == before
    found = _by_operation(printed)
    assert list(found) == list(operations.OPERATIONS)
    wrong = {name: (found[name], told[name]) for name in found if found[name] != told[name]}
    assert not wrong, "\n".join(_difference(name, *pair) for name, pair in wrong.items())
    assert report["mechanism"] == mechanism
    assert report["files"]["count"] > 50
    assert report["files"]["deleted_count"] > 10
