"""What grew between two reports: by module, by source line, and where lines have moved between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import graphmem
from graphmem.estimate import Estimate
from graphmem.planning.compare import compare
from graphmem.planning.grown import grown
from graphmem.reports.holders import holders
from graphmem.trace import Category, TraceBuilder
from graphmem.units import MIB
from tests.support.estimates import stepping_estimate


def _report(**lines: int) -> dict[str, dict[str, dict[str, int]]]:
    return {"at_peak": {"modules": {}, "lines": {name.replace("_", ":"): size for name, size in lines.items()}}}


def _changes(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    found = grown(_report(**before), _report(**after))["lines"]
    assert found is not None
    assert sum(row["before"] for row in found.values()) == sum(before.values())
    assert sum(row["after"] for row in found.values()) == sum(after.values())
    return {name: row["change"] for name, row in found.items()}


def _requested_at_peak(estimate: Estimate) -> int:
    assert estimate.timeline is not None
    return int(estimate.timeline.requested_bytes[estimate.moment.event])


def test_the_bytes_at_the_peak_are_all_somebodys() -> None:
    estimate = stepping_estimate()
    said = estimate.to_dict()["at_peak"]
    for by in ("modules", "lines"):
        assert sum(said[by].values()) == _requested_at_peak(estimate)
    assert said["modules"]["layers.3"] == (4 + 3 + 2) * MIB + 7, "a parameter, an activation and a temporary"
    assert estimate.without_events().to_dict()["at_peak"] is None


def test_layers_stand_together_and_modules_that_are_only_numbered_do_not() -> None:
    builder = TraceBuilder("hand-made")
    for module in ("", "h.0", "h.0.mlp", "h.1.mlp", "h.1.attn.3", "h.1", "head.2"):
        builder.alloc(10, builder.operator("aten.mm", module), Category.ACTIVATION)
    trace = builder.build()
    modules = holders(trace, len(trace) - 1)["modules"]
    assert modules == {"h.*": 20, "h.*.mlp": 20, "": 10, "h.*.attn.3": 10, "head.2": 10}


def test_a_line_is_found_where_it_moved_to() -> None:
    assert _changes({"a.py_7": 100, "b.py_1": 5}, {"a.py_9": 150, "b.py_1": 5}) == {"a.py:7 -> 9": 50, "b.py:1": 0}
    moved = _changes({"a.py_7": 100, "a.py_8": 30}, {"a.py_7": 64, "a.py_8": 100, "a.py_9": 30})
    assert moved == {"a.py:7": 64, "a.py:7 -> 8": 0, "a.py:8 -> 9": 0}
    grew = _changes({"a.py_7": 100, "a.py_8": 30}, {"a.py_7": 200, "a.py_8": 60, "a.py_9": 1})
    assert grew == {"a.py:7": 100, "a.py:8": 30, "a.py:9": 1}, "the same numbers are the same lines"
    moved = _changes({"a.py_7": 100, "a.py_8": 30}, {"a.py_6": 64, "a.py_9": 100, "a.py_10": 30})
    assert moved == {"a.py:6": 64, "a.py:7 -> 9": 0, "a.py:8 -> 10": 0}
    gone = _changes({"a.py_7": 100, "a.py_8": 30, "a.py_9": 4}, {"a.py_6": 30, "": 1})
    assert gone == {"a.py:7": -100, "a.py:9": -4, "": 1, "a.py:8 -> 6": 0}


def test_a_comparison_names_what_grew_and_sums_the_rest() -> None:
    before = stepping_estimate()
    assert before.trace is not None
    grows = [replace(one, bytes=2 * one.bytes) if "layers.2" in one.label else one for one in before.trace.storages]
    after = graphmem.replay_trace(replace(before.trace, storages=tuple(grows)), device="T4")
    compared = compare(before, after)
    modules = {name: row["change"] for name, row in compared.values["modules"].items() if row["change"]}
    assert modules == {"layers.2": 3 * MIB}
    assert "layers.2" in compared.report("text")
    changed = sum(row["change"] for row in compared.values["lines"].values())
    assert changed == _requested_at_peak(after) - _requested_at_peak(before)
    older = {name: value for name, value in before.to_dict().items() if name != "at_peak"}
    assert grown(older, after.to_dict()) == {"modules": None, "lines": None}


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(stepping_estimate().to_json().replace('"layers.3": ', '"layers.3": "x", "y": '), encoding="utf-8")
    with pytest.raises(graphmem.GraphmemError, match="damaged"):
        compare(str(path), str(path))
