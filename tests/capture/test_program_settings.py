"""Variables that a program sets itself count as long as they have not been read. Figures: the CUDA build of 2.13 on the
stub driver, as a card with compute capability 9.0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import graphmem
from graphmem.analyze import analyze
from graphmem.sources.base import Program

_PROGRAM = """
import os, sys
variable, value, when = sys.argv[1:]
def now(moment):
    if moment == when: os.environ[variable] = value
now("before torch")
import torch
now("before the card")
a = torch.ones(100, 100, device="cuda")
now("before a product")
b = a @ a
now("after it")
c = torch.ones(3_000_000, device="cuda")
d = torch.ones(700, 700, device="cuda") @ torch.ones(700, 700, device="cuda")
"""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":16:8")
_DEFAULT, _EXPANDABLE, _SMALL = (52_099_584, 69_206_016), (51_516_928, 65_011_712), (18_676_224, 35_651_584)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (_ALLOCATOR[0], "PYTORCH_ALLOC_CONF", _CUBLAS[0]):
        monkeypatch.delenv(name, raising=False)


def _peaks(folder: Path, *arguments: str, alloc_conf: str | None = None) -> tuple[tuple[int, int], graphmem.Estimate]:
    path = folder / "program.py"
    path.write_text(_PROGRAM, encoding="utf-8")
    estimate = analyze(Program(str(path), arguments), device="H200", torch_version="2.13", alloc_conf=alloc_conf)
    return (estimate.allocated, estimate.reserved), estimate


@pytest.mark.parametrize(
    ("variable", "when", "recorded"),
    [
        (_ALLOCATOR, "before torch", _EXPANDABLE),
        (_ALLOCATOR, "before the card", _EXPANDABLE),
        (_ALLOCATOR, "before a product", _DEFAULT),
        (_CUBLAS, "before torch", _SMALL),
        (_CUBLAS, "before a product", _SMALL),
        (_CUBLAS, "after it", _DEFAULT),
    ],
)
def test_a_variable_counts_until_it_is_read(
    variable: tuple[str, str], when: str, recorded: tuple[int, int], tmp_path: Path
) -> None:
    peaks, estimate = _peaks(tmp_path, *variable, when)
    assert peaks == recorded
    assert variable[0] not in os.environ  # the program's environment ends with it
    told = any("expandable_segments:True, as the program sets it" in one for one in estimate.assumptions)
    assert told is (recorded == _EXPANDABLE)


def test_settings_that_are_asked_for_win(tmp_path: Path) -> None:
    peaks, estimate = _peaks(tmp_path, *_ALLOCATOR, "before torch", alloc_conf="")
    assert peaks == _DEFAULT
    assert any("is not followed: others are given" in one for one in estimate.assumptions)
