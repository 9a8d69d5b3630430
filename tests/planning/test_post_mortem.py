"""Snapshots of runs that ran out of memory: what killed them, who held the rest, and what would have saved them.

The truth is recorded: the same runs on the same small cards with other settings (``python -m tests.recorded dead``).
"""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.planning.post_mortem import PostMortem, _Trial, post_mortem, replay_dead
from graphmem.sources.snapshot import Recording, heap_at_death, recording_of, trace_of
from graphmem.trace import EventKind
from graphmem.units import MIB
from tests.recorded import dead

VERSION = (2, 13)
NAMES = sorted(dead.RUNS)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def recording(name: str) -> Recording:
    return recording_of(dead.recorded(name))


@pytest.fixture(scope="module")
def found(name: str, recording: Recording) -> PostMortem:
    return post_mortem(recording, torch_version=VERSION, batch=dead.RUNS[name].batch)


def _file(name: str, folder: Path) -> str:
    path = folder / "oom.pickle"
    path.write_bytes(gzip.decompress((dead.FOLDER / f"{name}{dead.SUFFIX}").read_bytes()))
    return str(path)


# --- the truth --------------------------------------------------------------------------------------------------------


def test_the_replay_dies_of_the_request_that_killed_the_run(found: PostMortem, name: str) -> None:
    assert found.agrees
    assert found.segment_bytes == dead.survivors()[name][""]
    assert found.room_bytes == dead.RUNS[name].room_mib * MIB


def test_every_setting_ends_as_it_did_on_the_card(recording: Recording, found: PostMortem, name: str) -> None:
    trial = _Trial(trace_of(recording), found.room_bytes, VERSION)
    ended = dead.survivors()[name]
    replayed = {conf: trial.attempt(conf, "", conf).saves for conf in ("", *dead.SETTINGS)}
    assert replayed == {conf: ended[conf] == 0 for conf in ("", *dead.SETTINGS)}


def test_a_batch_of_one_less_ends_as_it_did_on_the_card(found: PostMortem, name: str) -> None:
    attempt = next(one for one in found.attempts if one.change.startswith("a batch of"))
    assert attempt.saves is (dead.survivors()[name]["batch of one less"] == 0)


def test_both_answers_are_among_the_recorded_ones() -> None:
    ended = [refused == 0 for settings in dead.survivors().values() for refused in settings.values()]
    assert any(ended)
    assert not all(ended)


# --- the heap ---------------------------------------------------------------------------------------------------------


def test_holes_and_blocks_are_those_of_the_snapshot(recording: Recording, found: PostMortem) -> None:
    blocks = [block for segment in recording.final_segments for block in segment.blocks]
    free = sorted((block.size for block in blocks if block.state == "free"), reverse=True)
    assert found.hole_count == len(free)
    assert list(found.holes) == free[: len(found.holes)]
    assert found.hole_bytes == sum(free)
    assert found.allocated_bytes == sum(block.size for block in blocks if block.state != "free")
    assert found.usable_bytes < found.segment_bytes


def test_who_held_the_rest_is_told_by_line(found: PostMortem) -> None:
    assert found.holders[0].bytes >= found.holders[-1].bytes
    assert any("dead.py:" in holder.source for holder in found.holders)
    assert sum(holder.bytes for holder in found.holders) <= found.allocated_bytes


def test_what_was_freed_after_the_error_was_held_when_it_came() -> None:
    """Snapshots are also taken where the error is caught, when the variables of the step are gone."""
    snapshot = _of(
        [
            _event("segment_alloc", 0, 20 * MIB),
            _event("alloc", 0, 8 * MIB, name="first"),
            _event("alloc", 8 * MIB, 4 * MIB, name="second"),
            {"action": "oom", "device_free": MIB, "size": 30 * MIB, "stream": 0},
            _event("free_requested", 0, 8 * MIB),
            _event("free_completed", 0, 8 * MIB),
        ],
        [("inactive", 8 * MIB), ("active_allocated", 4 * MIB), ("inactive", 8 * MIB)],
    )
    taken = recording_of(snapshot)
    heap = heap_at_death(taken)
    assert [(block.requested_bytes, block.name) for block in heap.blocks] == [(8 * MIB, "first"), (4 * MIB, "second")]
    assert [hole.bytes for hole in heap.holes] == [8 * MIB]
    found = post_mortem(taken, torch_version=VERSION)
    assert (found.requested_bytes, found.missing_bytes) == (30 * MIB, 29 * MIB)
    assert trace_of(taken).kinds.tolist() == [EventKind.ALLOC] * 3


def test_an_error_that_was_caught_is_no_death() -> None:
    snapshot = _of(
        [
            _event("segment_alloc", 0, 20 * MIB),
            {"action": "oom", "device_free": MIB, "size": 30 * MIB, "stream": 0},
            _event("alloc", 0, 8 * MIB),
        ],
        [("active_allocated", 8 * MIB), ("inactive", 12 * MIB)],
    )
    taken = recording_of(snapshot)
    assert taken.death is None
    assert trace_of(taken).kinds.tolist() == [EventKind.REFUSED, EventKind.ALLOC]
    with pytest.raises(UsageError, match="did not run out"):
        post_mortem(taken, torch_version=VERSION)


def test_a_limit_of_the_process_is_told_from_a_full_card() -> None:
    snapshot = _of(
        [
            _event("segment_alloc", 0, 20 * MIB),
            _event("alloc", 0, 8 * MIB),
            {"action": "oom", "device_free": 999 * MIB, "size": 30 * MIB, "stream": 0},
        ],
        [("active_allocated", 8 * MIB), ("inactive", 12 * MIB)],
    )
    found = post_mortem(recording_of(snapshot), torch_version=VERSION)
    assert found.missing_bytes == 0
    assert found.agrees


def test_what_the_allocator_gave_back_for_want_of_memory_is_left_to_the_replay() -> None:
    """The program's own empty_cache stays: the card still had room then."""
    events = [
        _event("segment_alloc", 0, 20 * MIB),
        _event("segment_alloc", 100 * MIB, 20 * MIB),
        _event("segment_free", 100 * MIB, 20 * MIB),  # the program's
        _event("segment_alloc", 200 * MIB, 30 * MIB),
        _event("segment_free", 200 * MIB, 30 * MIB),  # the allocator's own
        {"action": "oom", "device_free": 60 * MIB, "size": 90 * MIB, "stream": 0},
    ]
    taken = recording_of(_of(events, [("inactive", 20 * MIB)]))
    assert trace_of(taken).kinds.tolist() == [EventKind.EMPTY_CACHE, EventKind.ALLOC]


def _event(action: str, address: int, size: int, name: str = "") -> dict[str, Any]:
    frames = [{"name": name, "filename": "train.py", "line": 3}] if name else []
    return {"action": action, "addr": address + (1 << 40), "size": size, "stream": 0, "frames": frames}


def _of(events: list[dict[str, Any]], blocks: list[tuple[str, int]]) -> dict[str, Any]:
    rows = [{"state": state, "size": size, "requested_size": size} for state, size in blocks]
    total = sum(size for _, size in blocks)
    segment = {
        "address": 1 << 40, "total_size": total, "stream": 0, "segment_type": "large", "blocks": rows, "device": 0
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}}


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_killed_the_run(tmp_path: Path, name: str) -> None:
    batch = str(dead.RUNS[name].batch)
    result = CliRunner().invoke(cli, ["replay", _file(name, tmp_path), "--batch", batch, "--fail-on-oom", "--details"])
    assert result.exit_code == 3, result.output
    words = " ".join(result.output.split())
    assert "RAN OUT OF MEMORY" in words
    assert "Who held the rest" in words
    assert "instead of" in words
    assert "FITS" not in words
    assert ("Would have saved it: expandable_segments:True" in words) is (name == "lengths_that_vary")


def test_another_card_is_asked_for_the_request_too(tmp_path: Path) -> None:
    path = _file("one_size", tmp_path)
    fits = CliRunner().invoke(cli, ["replay", path, "--gpu", "A10G", "--details"])
    assert fits.exit_code == 0
    assert "FITS A10G" in fits.output
    assert "When the recorded run died" in fits.output


def test_a_run_that_repeats_asks_for_its_batch(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["replay", _file("one_size", tmp_path), "--details"])
    assert "give --batch N" in result.output


def test_json_has_every_attempt(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["replay", _file("lengths_that_vary", tmp_path), "--format", "json"])
    told = json.loads(result.output)["details"]["out_of_memory"]
    assert {"change", "saves", "spare_bytes", "missing_bytes"} <= told["attempts"][0].keys()
    assert told["missing_bytes"] > 0


def test_a_batch_is_for_runs_that_died(tmp_path: Path) -> None:
    (tmp_path / "alive.pickle").write_bytes(pickle.dumps(_of([], [("active_allocated", 8 * MIB)])))
    result = CliRunner().invoke(cli, ["replay", str(tmp_path / "alive.pickle"), "--batch", "4"])
    assert result.exit_code == 1
    assert "this one did not" in result.output


@pytest.mark.slow
def test_a_page_has_the_same_tables(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["replay", _file("lengths_that_vary", tmp_path), "--format", "html"])
    assert "<h2>Who held the rest" in result.output
    assert "YES, " in result.output


def test_replaying_takes_the_settings_that_are_given() -> None:
    recording = recording_of(dead.recorded("lengths_that_vary"))
    estimate = replay_dead(recording, alloc_conf="expandable_segments:True")
    told = estimate.details["out_of_memory"]
    assert not told["agrees"]
    assert not any("expandable" in attempt["change"] for attempt in told["attempts"])


def test_the_recordings_hold_no_names_of_this_machine() -> None:
    for name in NAMES:
        data = gzip.decompress((dead.FOLDER / f"{name}{dead.SUFFIX}").read_bytes())
        assert isinstance(pickle.loads(data), dict)
        assert b"/home/" not in data
        assert b"/root/" not in data
