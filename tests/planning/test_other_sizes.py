"""The page of an analysis at other sizes: what a template wrote is what is analysed there, or nothing is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphmem
from graphmem.planning import other_sizes as sizes
from graphmem.planning.documents import with_sizes
from graphmem.planning.other_sizes import other_sizes, too_long
from graphmem.reports.document import Choices, Shares, Text

pytest.importorskip("torch")

_MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 10)

    def forward(self, x):
        x = self.first(x).relu()
        {branch}
        return self.last(x).sum()

def build(batch):
    return Net(), torch.randn(batch, 512)
"""


def _model(folder: Path, branch: str = "pass") -> str:
    path = folder / "model.py"
    path.write_text(_MODEL.format(branch=branch))
    return f"{path}:build"


def test_a_step_that_is_too_long_says_why_there_is_no_slider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = graphmem.analyze(_model(tmp_path), batch=8, device="T4")
    assert estimate.trace is not None
    assert too_long(estimate) == ""
    monkeypatch.setattr(sizes, "_MOST_EVENTS", 5)
    document = with_sizes(estimate.document(details=True), {}, estimate, too_long(estimate))
    said = [
        line for one in document.sections for block in one.blocks if isinstance(block, Text) for line in block.lines
    ]
    assert any(f"a step of {len(estimate.trace):,} events. graphmem sweep MODEL" in line for line in said)


def test_each_size_is_as_it_is_analysed(tmp_path: Path) -> None:
    model = _model(tmp_path)
    asked: dict[str, Any] = {"batch": 64, "device": "T4"}
    estimate = graphmem.analyze(model, **asked)
    found = other_sizes(model, {**asked, "ranks": None}, estimate)
    assert list(found) == ["batch"]
    batches = found["batch"]
    assert min(batches) < 64 < max(batches)
    assert batches[64].peak == estimate.peak
    for batch in (min(batches), max(batches)):
        assert batches[batch].peak == graphmem.analyze(model, batch=batch, device="T4").peak
    document = with_sizes(estimate.document(details=True), found, estimate)
    (choices,) = [block for one in document.sections for block in one.blocks if isinstance(block, Choices)]
    assert choices.first == ("64",)
    for (name,), (said, shares) in choices.cases.items():
        assert isinstance(said, Text)
        assert isinstance(shares, Shares)
        one = batches[int(name)]
        assert shares.total[1] == sum(one.breakdown.values())
        assert ("by template" in said.lines[0]) == (int(name) != 64)


@pytest.mark.parametrize("asked", [{"device": "T4"}, {"batch": 8, "device": "T4", "ranks": "all"}])
def test_nothing_is_offered_where_no_size_was_given_or_processes_differ(tmp_path: Path, asked: dict[str, Any]) -> None:
    model = _model(tmp_path)
    estimate = graphmem.analyze(model, batch=8, device="T4")
    assert other_sizes(model, asked, estimate) == {}


def test_a_batch_of_one_and_a_long_step_cost_no_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = _model(tmp_path), list[str]()
    one, two = (graphmem.analyze(model, batch=batch, device="T4") for batch in (1, 2))
    assert other_sizes(model, {"batch": 1, "device": "T4"}, one, said.append) == {}
    assert two.trace is not None
    monkeypatch.setattr("graphmem.planning.other_sizes._MOST_EVENTS", len(two.trace) - 1)
    assert other_sizes(model, {"batch": 2, "device": "T4"}, two, said.append) == {}
    assert said == []


@pytest.mark.slow
def test_nothing_is_offered_where_a_template_is_not_proven(tmp_path: Path) -> None:
    model = _model(tmp_path, "x = x @ x.T @ x if x.shape[0] % 3 else x * 2")
    asked: dict[str, Any] = {"batch": 64, "device": "T4"}
    assert other_sizes(model, asked, graphmem.analyze(model, **asked)) == {}
