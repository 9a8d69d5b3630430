"""Programs that run out of memory on their card: what they need, whether they went on, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import first_quick

pytest.importorskip("torch")

GIB = 1 << 30

_MODEL = """
import sys, torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(batch):
    for _ in range(2):
        model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

"""
#: 1 GiB of each activation: two iterations need more than 6 GiB.
_CAUGHT = """
try:
    train(1 << 18)
except torch.cuda.OutOfMemoryError:
    {then}
"""
_SEARCH_UPWARDS = """
batch = 1 << 14
while True:
    try:
        train(batch)
    except torch.OutOfMemoryError:
        break
    batch *= 2
print("largest", batch // 2)
"""
_HALVES = """
batch = 1 << 18
while True:
    try:
        train(batch)
        break
    except RuntimeError as error:
        assert "out of memory" in str(error)
        batch //= 2
        torch.cuda.empty_cache()
print("trained with", batch)
"""


def run(folder: Path, body: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON, and the text of ``graphmem run`` on a card of 4 GiB."""
    (folder / "train.py").write_text(_MODEL + body, encoding="utf-8")
    line = [sys.executable, "-m", "graphmem", "run", "--gpu-memory", "4GiB", "--fail-on-oom"]
    outputs = ["-o", str(folder / "report.json"), "train.py"]
    done = subprocess.run([*line, *outputs], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, json.loads((folder / "report.json").read_text()), done.stderr


@pytest.mark.parametrize(
    "then",
    first_quick(
        ["torch.cuda.memory._dump_snapshot('oom.pickle')", "sys.exit(1)", "model.cpu()(torch.randn(8, 1024))"], 1
    ),
)
def test_who_catches_the_error_and_gives_up_does_not_fit(tmp_path: Path, then: str) -> None:
    code, report, _ = run(tmp_path, _CAUGHT.format(then=then))
    assert code == 3
    assert report["fits"]["verdict"] == "no"
    assert report["fits"]["device_bytes"] > 6 * GIB  # of the run that it would have been
    assert report["details"]["least"]["bytes"] == report["fits"]["device_bytes"]
    assert "train.py:8" in report["fits"]["failed_at"]["source"]


def test_who_searches_upwards_and_gives_up_needs_at_least_what_was_refused(tmp_path: Path) -> None:
    code, report, said = run(tmp_path, _SEARCH_UPWARDS)
    fits = report["fits"]
    assert code == 3
    assert "largest" in said  # the search ended, as it does on a card
    assert fits["verdict"] == "no"
    assert not fits["refusals"]["went_on"]
    assert fits["device_bytes"] >= fits["refusals"]["needed_bytes"]
    assert fits["margin_bytes"] < 0


def test_who_goes_on_with_less_fits_and_the_report_says_both(tmp_path: Path) -> None:
    code, report, said = run(tmp_path, _HALVES)
    fits = report["fits"]
    assert code == 0
    assert f"trained with {1 << 16}" in said
    assert fits["verdict"] == "yes"
    assert fits["refusals"]["went_on"]
    assert fits["refusals"]["first_bytes"] == GIB
    assert fits["refusals"]["needed_bytes"] > 4 * GIB > fits["device_bytes"]


def test_every_table_is_of_the_run_on_the_card_that_is_named(tmp_path: Path) -> None:
    """Without a limit the cached segments of all these sizes stay."""
    sizes = "for size in range(100, 900, 10):\n    torch.empty(size << 20, dtype=torch.uint8, device='cuda')\n"
    code, report, _ = run(tmp_path, sizes)
    fits = report["fits"]
    assert code == 0
    assert fits["needs_cache_flush"]
    assert fits["unlimited_bytes"] > 8 * GIB
    assert report["peak"]["device_bytes"] == report["card"]["process_bytes"] == fits["device_bytes"] <= 4 * GIB
    assert sum(report["breakdown"].values()) <= 4 * GIB
    assert max(phase["device_bytes"] for phase in report["phases"]) == fits["device_bytes"]


def test_the_least_memory_that_does_is_enough_and_less_is_not(tmp_path: Path) -> None:
    sizes = "kept = []\nfor size in range(20, 80):\n    torch.empty(size << 24, dtype=torch.uint8, device='cuda')\n"
    kept = "kept = [torch.empty(1 << 30, dtype=torch.uint8, device='cuda') for _ in range(4)]\n"
    code, report, _ = run(tmp_path, sizes + kept)
    least = report["details"]["least"]
    assert code == 3
    assert 4 * GIB < least["flushed_bytes"] < least["bytes"] == report["fits"]["device_bytes"]
