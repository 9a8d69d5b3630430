"""The scripts of ``.ci`` and the workflows that call them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import places

SCRIPTS = places.ROOT / ".ci"
WORKFLOWS = sorted((places.ROOT / ".github" / "workflows").glob("*.yml"))
if not SCRIPTS.is_dir():
    pytest.skip("the installed package is tested, without the checkout", allow_module_level=True)


def _git(folder: Path, *arguments: str) -> None:
    """Run git as somebody, without the developer's own settings."""
    identity = {f"GIT_{role}_{part}": "a@b" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **identity, **alone})


def _lines(folder: Path, *arguments: str) -> dict[str, list[str]]:
    command = [sys.executable, str(folder / ".ci" / "lines"), *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line[:30].strip(): line[30:].split() for line in printed.splitlines()}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A branch of ``main`` that adds a room of 3 lines, takes 1 from a rule, and has a file that is not yet added."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "checkout"
    for name in (".ci", "graphmem/capture/kernels/rules", "graphmem/room", "tests"):
        (folder / name).mkdir(parents=True)
    shutil.copy(SCRIPTS / "lines", folder / ".ci" / "lines")
    (folder / "graphmem" / "top.py").write_text("a\nb\n")
    (folder / "graphmem" / "capture" / "kernels" / "rules" / "rule.py").write_text("a\nb\n")
    (folder / "tests" / "test_a.py").write_text("a\n")
    _git(folder, "init", "--initial-branch", "main")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-m", "first")
    _git(folder, "checkout", "-b", "branch")
    (folder / "graphmem" / "capture" / "kernels" / "rules" / "rule.py").write_text("a\n")
    (folder / "graphmem" / "room" / "new.py").write_text("a\nb\n")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-m", "second")
    (folder / "graphmem" / "room" / "newer.py").write_text("a\n")
    return folder


def test_lines_are_counted_by_room_with_the_difference_against_main(checkout: Path) -> None:
    assert _lines(checkout) == {
        "graphmem": ["2"],
        "graphmem/capture/kernels": ["1", "-1"],
        "graphmem/room": ["3", "+3"],
        "graphmem, all": ["6", "+2"],
        "tests": ["1"],
        "models_zoo": ["0"],
    }
    assert _lines(checkout, "HEAD")["graphmem/room"] == ["3", "+1"]


def test_without_main_or_git_the_lines_alone_are_printed(checkout: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    source = checkout.as_uri()
    _git(tmp_path, "clone", "--depth", "1", "--branch", "branch", source, str(shallow))
    assert _lines(shallow)["graphmem, all"] == ["5"]
    shutil.move(shallow / ".git", tmp_path / "away")
    assert _lines(shallow)["graphmem, all"] == ["5"]


def test_a_commit_that_is_not_there_is_named(checkout: Path) -> None:
    command = [sys.executable, str(checkout / ".ci" / "lines"), "nothing"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", ".ci/lines: git does not know 'nothing'\n")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_one_and_calls_scripts_that_exist(path: Path) -> None:
    """``on`` is read as true by YAML 1.1. Steps run one of ours, or one of GitHub's actions."""
    workflow: dict[Any, Any] = pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))
    assert {"name", True, "permissions", "jobs"} <= set(workflow)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert step.get("uses", "actions/").startswith("actions/")
            for word in step.get("run", "").split():
                assert not word.startswith(".ci/") or os.access(places.ROOT / word, os.X_OK), word


def test_the_workflows_run_what_contributors_run() -> None:
    said = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    assert {".ci/run", ".ci/slow", ".ci/versions"} <= set(said.split())
    for system in ("ubuntu", "macos", "windows"):
        assert f"{system}-latest" in said
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f'"{version}"' in said
