"""The text report against golden files, and what must hold for any estimate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from graphmem import analyze, compare
from graphmem.base.figures import Doubts, unknown
from graphmem.diagnostics import Code
from graphmem.estimate import Estimate, Fit, LiveStorage, Moment, Peak, PhasePeak
from graphmem.planning.advise import Advised
from graphmem.planning.sweep import Row, Rows
from graphmem.reports.document import shortened
from graphmem.reports.formats.text import FORMAT, MINIMUM_WIDTH, TERMINAL
from graphmem.reports.screen import HEIGHT
from graphmem.runtimes import runtime_named
from graphmem.trace import Category
from graphmem.units import GIB, format_bytes
from tests.support.estimates import failing_estimate, inference_estimate, training_estimate
from tests.support.pictures import picture

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
    assert f"{sum(estimate.breakdown.values()):,} B" in estimate.report(details=True)


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


@given(estimates, st.booleans(), st.integers(0, 200))
def test_any_estimate_renders_within_the_width_and_without_control_characters(
    estimate: Estimate, details: bool, width: int
) -> None:
    report = estimate.report(details=details, width=width)
    lines = report.split("\n")
    assert report.endswith("\n")
    assert all(line.isprintable() for line in lines)
    assert all(cell_len(line) <= max(width, MINIMUM_WIDTH) for line in lines)
    report.encode("utf-8")


@given(estimates)
def test_the_first_screen_of_any_estimate_is_a_screen(estimate: Estimate) -> None:
    lines = estimate.report(width=80).splitlines()
    assert len(lines) <= HEIGHT
    assert "--details" in lines[-1]


def test_the_bars_of_the_first_screen_add_up_to_the_edge_of_the_card() -> None:
    """A bar begins where the one above ended, and the last one is of all, as long as its share of the card."""
    estimate = training_estimate()
    assert estimate.fit is not None
    estimate = replace(estimate, fit=replace(estimate.fit, capacity_bytes=2 * estimate.fit.device_bytes))
    assert estimate.fit is not None
    rows = re.findall(r"^(\S.*?)  +[\d.]+ \wi?B +\d+ %  ([ #]+)\|$", estimate.report(width=100), re.MULTILINE)
    bars = [(len(bar) - len(bar.lstrip()), len(bar.rstrip())) for _, bar in rows]
    assert [name for name, _ in rows][-1].startswith("together, of ")
    assert all(abs(begin - end) <= 1 for (_, end), (begin, _) in pairwise(bars[:-1]))
    assert bars[-1][0] == 0
    assert abs(bars[-1][1] - bars[-2][1]) <= 1
    share = bars[-1][1] / len(rows[-1][1])
    assert share == pytest.approx(estimate.fit.device_bytes / estimate.fit.capacity_bytes, abs=0.05)


def test_bars_of_a_large_card_are_parts_of_what_they_sum_to() -> None:
    estimate = training_estimate()
    assert estimate.fit is not None
    large = replace(estimate.fit, capacity_bytes=40 * estimate.fit.device_bytes)
    *bars, whole = re.findall(r" %  ([ #|]+)$", replace(estimate, fit=large).report(width=100), re.MULTILINE)
    assert sum(bar.count("#") for bar in bars) >= len(whole) - len(bars)
    assert not any("|" in bar for bar in bars)
    assert re.fullmatch(r"#{1,2} +\|", whole)
    assert re.search(r"^together, of .* 2 %  #", replace(estimate, fit=large).report(), re.MULTILINE)


def test_what_is_shortened_keeps_its_words() -> None:
    assert shortened("transformers/modeling_layers_utils.py:3780", 34) == "transformers/...utils.py:3780"
    assert shortened("one two three four five six seven eight", 24) == "one two...seven eight"
    assert len(shortened("x" * 100, 30)) == 30
    assert shortened("short", 30) == "short"


@given(st.text(max_size=300), st.integers(10, 200))
def test_what_is_shortened_is_as_short(text: str, length: int) -> None:
    assert len(shortened(text, length)) <= max(length, 0)
    assert shortened(text, length) == text or "..." in shortened(text, length)


def test_the_least_that_would_do_is_told_where_it_differs_from_what_is_needed() -> None:
    estimate = failing_estimate()
    assert estimate.fit is not None
    need = estimate.fit.device_bytes

    def said(least: int, flushed: int | None) -> str:
        details = {"least": {"bytes": least, "flushed_bytes": flushed}}
        return " ".join(replace(estimate, details=details).report().split())

    assert "No less would do: giving cached segments back" in said(need, None)
    assert f"{format_bytes(2 * GIB)} less than without" in said(need, need - 2 * GIB)


def test_a_part_that_is_hardly_anything_is_not_what_to_change() -> None:
    estimate = training_estimate()
    assert "To use less: most is" in estimate.report()
    small = {"CONTEXT": 100 * GIB, "FRAGMENTATION": GIB}
    assert "most is" not in replace(estimate, breakdown=small).report()


def test_colours_are_for_terminals_alone() -> None:
    document = failing_estimate().document()
    assert "\x1b[" not in FORMAT.render(document)
    coloured = TERMINAL.render(document)
    assert "\x1b[1;31mDOES NOT FIT" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).count("\n") == FORMAT.render(document).count("\n")


def test_a_step_that_fails_on_a_card_says_so_before_the_verdict() -> None:
    estimate = training_estimate()
    why = Code.STEP_FAILS.about(tokens=2048, positions=1024)
    fails = replace(estimate, diagnostics=(*estimate.diagnostics, why))
    for shown in (fails.report(), fails.report(details=True)):
        assert "FAILS BEFORE MEMORY MATTERS: 2048 tokens" in shown
        assert "Its memory alone would fit H100-80GB: needs 5.68 GiB" in " ".join(shown.split())
        assert "FITS" not in shown
    assert '<div class="verdict no">' in fails.report("html")
    assert '<div class="verdict yes">' not in fails.report("html")
    assert compare(estimate, fails).values["fits"]["after"] == "no, the step fails on any card"
    (row,) = Rows([Row({"seq_len": 2048}, fails)])
    assert (row.figures["fits"], row.figures["on_card"]) == ("no", "FAILS on any card")
    assert "seq-len" not in str(Rows([row])).splitlines()[-1]
    assert "2048: 2048 tokens are more than" in str(Rows([row]))
    advised = str(Advised(fails, ()))
    assert "5.68 GiB of device memory, and fails on any card" in advised
    assert "BUT 2048 tokens are more than" in advised


def test_a_likely_verdict_beside_much_room_says_why() -> None:
    estimate = training_estimate()
    assert estimate.fit is not None
    doubts = Doubts((unknown("values assumed", "the data decides"),))
    likely = replace(estimate, doubts=doubts, fit=replace(estimate.fit, probability=0.96))
    shown = " ".join(likely.report().split())
    assert "LIKELY FITS H100-80GB (96 %): needs 5.68 GiB" in shown
    assert "73.50 GiB spare, enough unless a doubt without bound takes more." in shown
    roomy = replace(unknown("values assumed", "the data decides"), times=10)
    sure = " ".join(replace(estimate, doubts=Doubts((roomy,))).report().split())
    assert "FITS H100-80GB: needs" in sure
    assert "or more (the card has room for 10 times the reserved peak" in sure


def test_modules_are_a_tree_in_which_layers_that_are_alike_stand_together() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), *(torch.nn.Linear(64, 64) for _ in range(5)))
    estimate = analyze(model, torch.zeros(32, dtype=torch.long), device="T4", iterations=2)
    shown = estimate.report(tree=True)
    (layers,) = (line for line in shown.splitlines() if line.lstrip().startswith("1 to 5"))
    assert format_bytes(5 * 4 * (64 * 64 + 64)) in layers
    assert re.search(r"^ +0 +25\.00 KiB +25\.00 KiB", shown, re.MULTILINE)
    assert not re.search(r"^ +(weight|bias) ", shown, re.MULTILINE)  # the gradients' own names are no modules
    assert sum(float(share) for share in re.findall(r"^  \S.* ([\d.]+) %$", shown, re.MULTILINE)) == pytest.approx(
        100, abs=1
    )
    assert "not known" in estimate.without_events().report(tree=True)


def test_onnx_runtime_is_told_in_its_own_words() -> None:
    shown = replace(training_estimate(), levels=runtime_named("onnxruntime").levels).report(details=True)
    assert "TotalAllocated" in shown
    assert "max_memory_allocated" not in shown


def test_where_reserved_memory_grew_last_is_told_when_it_is_elsewhere() -> None:
    estimate = training_estimate()
    grew = Moment(7, "iteration 1 optimizer", "aten.sqrt", "", "")
    shown = replace(estimate, last_growth=grew).report(details=True)
    assert "reserved memory grew for the last time in iteration 1 optimizer: aten.sqrt" in shown
    assert "last time" not in replace(estimate, last_growth=estimate.moment).report(details=True)


def test_the_picture_of_the_docs_is_what_the_readme_asks(golden: Golden) -> None:
    pytest.importorskip("transformers")
    estimate = analyze("hf:gpt2", batch=4, seq_len=512, device="RTX-4090")
    shown = estimate.report()
    assert all(cell_len(line) <= 80 for line in shown.splitlines())
    shown = TERMINAL.render(estimate.document())
    golden("../../docs/screen.svg", picture(shown, "graphmem analyze", "screen"))
