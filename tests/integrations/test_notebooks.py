"""The notebooks of ``examples`` run from top to bottom, and are kept without outputs, which would grow old."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests import places

_NOTEBOOKS = sorted((places.ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("torch", "transformers", "pandas", "ipykernel"):
        pytest.importorskip(needed)
    nbclient: Any = pytest.importorskip("nbclient")
    nbformat: Any = importlib.import_module("nbformat")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(places.ROOT)}}).execute()
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "FITS" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert cells[0]["cell_type"] == "markdown"
