"""Jobs on cards: every process has a place or a reason, no card is overfull, and no fewer cards would do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.cli.main import cli
from graphmem.devices import device_named
from graphmem.errors import UsageError
from graphmem.units import GIB
from tests.support.examples import examples

pytest.importorskip("scipy")


def _fewest(sizes: list[int], room: int) -> int:
    """Bins for sizes that each fit one, by trying all partitions."""
    for count in range(1, len(sizes) + 1):
        for where in itertools.product(range(count), repeat=len(sizes)):
            loads = [sum(size for size, at in zip(sizes, where, strict=True) if at == one) for one in range(count)]
            if max(loads) <= room:
                return count
    return 0


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=5))
def test_no_fewer_cards_would_do(sizes: list[int]) -> None:
    jobs = [graphmem.Job(f"job {at}", memory_bytes=size * GIB) for at, size in enumerate(sizes)]
    packing = graphmem.pack(jobs, [f"{len(sizes)}xT4"])
    assert not packing.left_out
    assert sorted(need.job.name for shared in packing.cards for need in shared.needs) == [job.name for job in jobs]
    assert all(shared.room_bytes >= 0 for shared in packing.cards)
    assert len(packing.cards) == _fewest([size * GIB for size in sizes], device_named("T4").capacity_bytes)


def test_what_finds_no_room_has_a_reason_and_prices_decide() -> None:
    jobs = [graphmem.Job("small", count=3, memory_bytes=10 * GIB), graphmem.Job("huge", memory_bytes=900 * GIB)]
    packing = graphmem.pack(jobs, ["2xT4", "1xA100-80GB"])
    assert [(shared.card.name, len(shared.needs)) for shared in packing.cards] == [("A100-80GB", 3)]
    [(job, count, why)] = packing.left_out
    assert (job.name, count) == ("huge", 1)
    assert "it needs up to 900.00 GiB, and T4-16GB has" in why
    cheap = graphmem.pack(jobs, ["3xT4", "1xA100-80GB"], prices={"T4-16GB": 1, "A100-80GB": 10})
    assert [shared.card.name for shared in cheap.cards] == ["T4-16GB"] * 3
    full = graphmem.pack(jobs[:1], ["2xT4"])
    assert [(job.name, count, why) for job, count, why in full.left_out] == [("small", 1, "the cards are full")]


def test_a_model_needs_what_its_analysis_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    alone = graphmem.analyze("zoo:mlp", batch=8, device="T4")
    packing = graphmem.pack([graphmem.Job("vision", "zoo:mlp", 2, {"batch": 8})], ["1xT4"])
    [shared] = packing.cards
    assert [need.device_bytes for need in shared.needs] == [alone.device] * 2
    assert 0 <= shared.trouble <= 1
    assert packing.to_dict()["cards"][0]["jobs"][0]["device_bytes"] == alone.device


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ([], "there are no jobs"),
        ([graphmem.Job("a")], "job 'a': give a model, or the memory that it needs"),
        ([graphmem.Job("a", memory_bytes=1), graphmem.Job("a", memory_bytes=1)], "two jobs are called 'a'"),
        ([graphmem.Job("a", memory_bytes=1, count=0)], "count is a whole number from 1"),
    ],
)
def test_jobs_that_cannot_be_are_refused(jobs: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        graphmem.pack(jobs, ["1xT4"])


# --- the command ------------------------------------------------------------------------------------------------------


def _run(path: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["pack", str(path), "--gpus", "1xT4", *words])


def test_the_command(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nname = "one"\nmemory = "9GiB"\n[[job]]\nmemory = "9GiB"\n')
    shown = _run(jobs)
    assert shown.exit_code == 3
    assert "1 of 2 processes have a place, on 1 of 1 cards." in shown.stdout
    document = json.loads(_run(jobs, "--format", "json").stdout)
    assert document["schema"] == "graphmem.pack/1"
    assert [row["name"] for row in document["left_out"]] in (["one"], ["job 2"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no table [[job]]"),
        ("[[job", "is not TOML"),
        (
            '[[job]]\nmodel = "zoo:gpt2"\nbatches = 3',
            "job 'job 1': no 'batches' (did you mean batch?); accepted: batch",
        ),
        ('[[job]]\nmemory = "much"', "job 'job 1': "),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, text: str, words: str) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(text)
    shown = _run(jobs)
    assert shown.exit_code == 1
    assert words in shown.stderr
    assert _run(tmp_path / "none.toml").exit_code == 1
