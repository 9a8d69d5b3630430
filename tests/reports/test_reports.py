"""The text report against golden files, and what must hold for any estimate."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from graphmem.estimate import Estimate, Fit, LiveStorage, Moment, Peak, PhasePeak
from graphmem.reports.formats.text import MINIMUM_WIDTH
from graphmem.runtimes import runtime_named
from graphmem.trace import Category
from graphmem.units import GIB
from tests.support.estimates import failing_estimate, inference_estimate, training_estimate

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_first_screen(golden: Golden, width: int) -> None:
    golden(f"reports/training_{width}.txt", training_estimate().report(width=width))


def test_details_show_every_phase_and_storage(golden: Golden) -> None:
    golden("reports/training_details.txt", training_estimate().report(details=True))


def test_a_step_that_does_not_fit_says_where_and_by_how_much(golden: Golden) -> None:
    golden("reports/does_not_fit.txt", failing_estimate().report())


def test_an_estimate_without_a_card(golden: Golden) -> None:
    golden("reports/inference.txt", inference_estimate().report())


def test_a_replay_shows_what_was_recorded_beside_what_would_be(golden: Golden) -> None:
    recorded = {"allocated_bytes": 5 * GIB, "reserved_bytes": 6 * GIB}
    estimate = replace(inference_estimate(), details={"recorded": recorded})
    golden("reports/replay.txt", estimate.report())


def test_fitting_only_after_a_flush_is_said() -> None:
    estimate = training_estimate()
    assert estimate.fit is not None
    report = replace(estimate, fit=replace(estimate.fit, needs_cache_flush=True)).report()
    assert "gives cached segments back" in report


def test_the_sum_line_is_the_exact_sum() -> None:
    estimate = training_estimate()
    assert f"{sum(estimate.breakdown.values()):,} B" in estimate.report()


def test_the_json_report_is_the_estimate() -> None:
    document = json.loads(training_estimate().report("json"))
    assert document == json.loads(training_estimate().to_json())
    assert sum(document["breakdown"].values()) == document["peak"]["device_bytes"]


sizes = st.integers(0, 2**50)
words = st.text(max_size=60)
moments = st.builds(Moment, st.integers(0, 10**9), words, words, words, words)
peaks = st.builds(Peak, sizes, sizes, sizes, sizes)
estimates = st.builds(
    Estimate,
    model=words,
    runtime=words,
    allocator=words,
    step=words,
    gpu=words,
    peak=peaks,
    ideal_bytes=sizes,
    phases=st.lists(st.builds(PhasePeak, st.integers(0, 4), words, peaks), max_size=6).map(tuple),
    moment=moments,
    breakdown=st.dictionaries(st.sampled_from([c.name for c in Category] + ["ROUNDING", "CONTEXT", "odd"]), sizes),
    top=st.lists(st.builds(LiveStorage, sizes, words, words, words, words, words, words), max_size=4).map(tuple),
    fit=st.none() | st.builds(Fit, words, sizes, sizes, st.integers(-(2**50), 2**50), st.booleans()),
    assumptions=st.lists(words, max_size=2).map(tuple),
    details=st.dictionaries(words, sizes | words | st.lists(sizes) | st.dictionaries(words, sizes), max_size=3),
)


@given(estimates, st.booleans(), st.integers(0, 10), st.integers(0, 200))
def test_any_estimate_renders_within_the_width_and_without_control_characters(
    estimate: Estimate, details: bool, top: int, width: int
) -> None:
    report = estimate.report(details=details, top=top, width=width)
    lines = report.split("\n")
    assert report.endswith("\n")
    assert all(line.isprintable() for line in lines)
    assert all(cell_len(line) <= max(width, MINIMUM_WIDTH) for line in lines)
    report.encode("utf-8")


def test_onnx_runtime_is_told_in_its_own_words() -> None:
    shown = replace(training_estimate(), levels=runtime_named("onnxruntime").levels).report()
    assert "TotalAllocated" in shown
    assert "max_memory_allocated" not in shown


def test_where_reserved_memory_grew_last_is_told_when_it_is_elsewhere() -> None:
    estimate = training_estimate()
    grew = Moment(7, "iteration 1 optimizer", "aten.sqrt", "", "")
    shown = replace(estimate, last_growth=grew).report()
    assert "reserved memory grew for the last time in iteration 1 optimizer: aten.sqrt" in shown
    assert "last time" not in replace(estimate, last_growth=estimate.moment).report()
