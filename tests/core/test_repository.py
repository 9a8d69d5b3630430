"""Files for those who find the repository: how it is cited, and what an issue asks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphmem
from tests import places

yaml = pytest.importorskip("yaml")

_TEMPLATES = places.ROOT / ".github" / "ISSUE_TEMPLATE"
pytestmark = pytest.mark.skipif(not _TEMPLATES.exists(), reason="needs the checkout")


def _read(name: str) -> Any:
    return yaml.safe_load((places.ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = _read("CITATION.cff")
    assert citation["version"] == graphmem.__version__
    notes = (places.ROOT / "docs" / "releases" / f"{graphmem.__version__}.md").read_text(encoding="utf-8")
    assert f"Released {citation['date-released']}" in notes
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


def test_a_release_is_used_as_its_workflow_says(tmp_path: Path) -> None:
    """The steps behind the installation, as they stand there."""
    pytest.importorskip("onnx")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if not all(shutil.which(name, path=path) for name in ("graphmem", "bash")):
        pytest.skip("the command is not installed, or there is no bash")
    steps = [step for step in _read(".github/workflows/release.yml")["jobs"]["use"]["steps"] if "run" in step]
    install, *others = steps
    assert "pip install" in install["run"]
    for step in others:
        run = ["bash", "-e", "-c", step["run"]]
        done = subprocess.run(
            run, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (step["name"], done.stderr)
    assert done.stdout.startswith("relu.onnx on ")


@pytest.mark.parametrize("name", ["wrong_figure", "error", "missing"])
def test_an_issue_asks_for_what_is_needed_to_answer_it(name: str) -> None:
    template = _read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert template["name"]
    assert template["description"]
    fields = [part["id"] for part in template["body"]]
    assert len(set(fields)) == len(fields)
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in template["body"])
    assert any(part.get("validations", {}).get("required") for part in template["body"])
