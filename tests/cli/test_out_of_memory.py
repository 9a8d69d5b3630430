"""Programs that run out of memory on their card: what they need, whether they went on, and the exit code."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphmem import replay
from graphmem.cli.main import cli
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


def run(folder: Path, body: str, memory: int = 4 * GIB) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON, and what the program and ``graphmem run`` say on a card of this memory."""
    (folder / "train.py").write_text(_MODEL + body, encoding="utf-8")
    done = graphmem_run("--gpu-memory", str(memory), "--fail-on-oom", "-o", "report.json", "train.py")
    return done.exit_code, json.loads((folder / "report.json").read_text()), done.stderr


@pytest.fixture(autouse=True)
def _beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def graphmem_run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["run", *words], prog_name="graphmem")


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
    assert 3 * GIB < report["card"]["process_bytes"] <= 4 * GIB  # as nvidia-smi shows it before it ends


def test_the_text_says_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_MODEL + _CAUGHT.format(then="sys.exit(1)"), encoding="utf-8")
    done = graphmem_run("--details", "--gpu-memory", "4GiB", "train.py")
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0
    assert "DOES NOT FIT 4.00 GiB card" in text
    need = re.search(r"needs ([\d.]+) GiB .* No less would do", text)
    assert need is not None
    assert "a smaller batch" in text
    assert "What follows is of a run on a larger card" in text
    assert re.search(r"this process 3\.\d+ GiB until it runs out of memory", text)
    assert "mend" not in text
    again = graphmem_run("--gpu-memory", f"{float(need[1]) + 0.01:.2f}GiB", "--fail-on-oom", "train.py")
    assert again.exit_code == 0
    assert "FITS" in again.stdout


def test_the_snapshot_that_a_dying_program_writes_is_replayed(tmp_path: Path) -> None:
    """As docs/questions/why_did_my_job_die.md has it, under ``graphmem run`` as on a card."""
    program = "torch.cuda.memory._record_memory_history()" + _CAUGHT.format(
        then="torch.cuda.memory._dump_snapshot('oom.pickle')"
    )
    (tmp_path / "train.py").write_text(_MODEL + program, encoding="utf-8")
    done = graphmem_run("--gpu-memory", "4GiB", "--allow-writes=.", "train.py")
    assert done.exit_code == 0, done.stderr
    report = replay(tmp_path / "oom.pickle", batch=1 << 18).report(details=True)
    text = " ".join(report.split())
    assert text.startswith("RAN OUT OF MEMORY: 1.00 GiB were asked for by aten.")
    assert "at train.py:8" in text.partition(". No")[0]
    assert "activations 3.00 GiB" in text
    assert "parameters" in text


def test_who_searches_upwards_and_gives_up_needs_at_least_what_was_refused(tmp_path: Path) -> None:
    code, report, said = run(tmp_path, _SEARCH_UPWARDS)
    fits = report["fits"]
    assert code == 3
    assert "largest" in said  # the search ended, as it does on a card
    assert fits["verdict"] == "no"
    assert not fits["refusals"]["went_on"]
    assert fits["device_bytes"] >= fits["refusals"]["needed_bytes"]
    assert report["certainty"]["levels"]["allocated"]["most_bytes"] is None  # it is the least
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
    assert fits["refusals"]["later_bytes"] == GIB // 4
    enough = report["details"]["least"]["bytes"]
    assert f"trained with {1 << 18}" not in said  # what it prints with more room is not shown
    for size, trains in ((enough, 1 << 18), (enough - (64 << 20), 1 << 17)):
        assert f"trained with {trains}" in run(tmp_path, _HALVES, size)[2]


@pytest.mark.parametrize("caught", first_quick([True, False], 1))
def test_who_runs_out_later_on_needs_what_the_same_run_is_served(tmp_path: Path, caught: bool) -> None:
    """Cached segments of other sizes are given back on the way; the work that is refused had been done before."""
    steps = "for rows in (100, 160, 200, 330, 480):\n    train(rows << 10)\n"
    handled = "try:\n" + textwrap.indent(steps, "    ") + "except torch.OutOfMemoryError:\n    sys.exit(1)\n"
    code, report, said = run(tmp_path, handled if caught else steps)
    least = report["details"]["least"]
    assert code == 3
    assert report["fits"]["verdict"] in ("no", "likely not")
    assert 4 * GIB < least["flushed_bytes"] < least["bytes"] == report["fits"]["device_bytes"]
    assert "failed" not in said
    again = run(tmp_path, handled if caught else steps, least["flushed_bytes"])
    assert again[0] == 0
    assert again[1]["fits"]["needs_cache_flush"]


def test_who_fills_any_card_ends(tmp_path: Path) -> None:
    fills = "kept = []\nwhile True:\n    kept.append(torch.empty(1 << 28, dtype=torch.uint8, device='cuda'))\n"
    code, report, said = run(tmp_path, fills)
    assert code == 3
    assert report["fits"]["verdict"] == "no"
    assert report["details"]["program"]["how"] == "memory"
    assert 4 * GIB < report["fits"]["device_bytes"] < 5 * GIB
    assert "mend" not in said


@pytest.mark.parametrize(
    "ends",
    first_quick(["undefined", "model(torch.randn(8, 7, device='cuda'))", "sys.exit('not good enough')"], 1),
)
def test_who_ends_with_an_error_of_its_own_has_no_verdict(tmp_path: Path, ends: str) -> None:
    code, report, said = run(tmp_path, f"train(64)\n{ends}\n")
    assert code == 1
    assert report["fits"] is None
    assert report["details"]["program"]["code"] == 1
    assert report["certainty"]["levels"]["device"]["most_bytes"] is None
    assert "after 2 optimizer steps" in said


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
