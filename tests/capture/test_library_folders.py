"""Packages that ``pip install --target`` puts into a folder of ``PYTHONPATH`` are libraries, as those elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem.analyze import analyze
from graphmem.base.imports import library_folder
from graphmem.diagnostics import Code
from graphmem.training.program import Program

_LIBRARY = """
import torch
try:
    import apex
except ImportError:
    apex = None
def normalised(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:])
"""
_PROGRAM = """
import torch, installed_norms
print(installed_norms.normalised(torch.zeros(64, 64, device="cuda")).sum())
"""


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_package_of_cards_that_a_library_does_not_find_is_no_doubt(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packages"
    (folder / "installed_norms").mkdir(parents=True)
    (folder / "installed_norms" / "__init__.py").write_text(_LIBRARY, encoding="utf-8")
    if is_installed:
        (folder / "installed_norms-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "installed_norms", raising=False)
    (tmp_path / "train.py").write_text(_PROGRAM, encoding="utf-8")
    estimate = analyze(Program(str(tmp_path / "train.py")))
    sys.modules.pop("installed_norms", None)
    codes = {one.code for one in estimate.diagnostics}
    assert (Code.OPTIONAL_MISSING in codes, Code.PACKAGE_MISSING in codes) == (is_installed, not is_installed)
    assert bool(estimate.doubts.about("reserved")) != is_installed
    assert library_folder(str(folder / "installed_norms" / "__init__.py")) == (str(folder) if is_installed else "")
    shown = {place.source for place in estimate.trace.operators} if estimate.trace else set()
    assert not is_installed or any(source.startswith("installed_norms/") for source in shown)


def test_the_folder_of_a_program_is_no_folder_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert library_folder(str(tmp_path / "train.py")) == ""
