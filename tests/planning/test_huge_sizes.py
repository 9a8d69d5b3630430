"""Sizes far above any card's: figures as of any other size, or one message; a run that ends early says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import graphmem
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate

torch = pytest.importorskip("torch")

_FACTORY = """
import torch
def build(batch):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    return model, torch.zeros(batch, 3, 32, 32)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(_FACTORY)
    return f"{tmp_path / 'net.py'}:build"


def _analyzed(model: str, batch: int) -> Estimate:
    return graphmem.analyze(model, batch=batch, device="T4", cudnn="never")


@pytest.mark.parametrize("batch", [10**6, 10**9])
def test_a_batch_that_no_card_holds_takes_as_much_a_sample_as_any_other(model: str, batch: int) -> None:
    large, larger = _analyzed(model, batch), _analyzed(model, 4 * batch)
    assert not larger.ends_early
    assert larger.allocated / large.allocated == pytest.approx(4, rel=0.01)
    assert larger.interval("device")[1] is not None


def test_a_run_that_ends_early_needs_at_least_what_it_took(model: str, tmp_path: Path) -> None:
    estimate = _analyzed(model, 20 * 10**12)
    assert estimate.fit is not None
    assert (estimate.fit.verdict, estimate.interval("device")[1]) == ("no", None)
    words = " ".join(estimate.report().split())
    assert "needs at least" in words
    assert "the run ends where it is refused memory" in words
    assert "exact" not in words
    assert "needs at least" in estimate.report("html")
    estimate.save(tmp_path / "after.json")
    document = json.loads((tmp_path / "after.json").read_text())
    assert document["certainty"]["levels"]["device"]["most_bytes"] is None
    compared = graphmem.compare(_analyzed(model, 1), tmp_path / "after.json")
    assert compared.to_dict()["ended_early"] == {"before": False, "after": True}
    assert "The run after ended early" in str(compared)
    rows = graphmem.sweep(model, vary={"batch": [1, 20 * 10**12]}, device="T4", cudnn="never")
    assert "the run ends where it is refused memory" in str(rows)


def test_what_no_number_holds_is_one_message(model: str) -> None:
    with pytest.raises(GraphmemError, match=r"net\.py:5: a tensor of sizes \[.*\] has more than 2\^63 - 1 bytes"):
        _analyzed(model, 10**16)
    with pytest.raises(GraphmemError, match=r"^more than 2\^63 - 1 bytes are alive together, more than any memory"):
        _analyzed(model, 2 * 10**14)
    with pytest.raises(GraphmemError, match=r"^storage \d+ \(.*\) has more than 2\^63 - 1 bytes, more than any memory"):
        graphmem.analyze(lambda: (torch.nn.Conv2d(2 * 10**13, 64, 16, stride=16), torch.empty(1, 2 * 10**13, 128, 128)))


def test_expandable_segments_grow_beyond_any_card(model: str) -> None:
    large, larger = (
        graphmem.analyze(model, batch=batch, device="T4", cudnn="never", alloc_conf="expandable_segments:True")
        for batch in (10**6, 10**9)
    )
    assert larger.reserved / large.reserved == pytest.approx(1000, rel=0.01)
    assert larger.reserved == pytest.approx(larger.allocated, rel=0.02)
