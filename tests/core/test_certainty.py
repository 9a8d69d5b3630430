"""How sure figures are: spreads, how causes add up, what becomes of a verdict, and the causes of an analysis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.analyze import replay_trace
from graphmem.answering import causes
from graphmem.answering.question import Question
from graphmem.answering.verdict import _bounded_share, holding, probability
from graphmem.base import versions
from graphmem.base.figures import (
    EXACT,
    MOST_TIMES,
    TRACE_LEVELS,
    Cause,
    Doubts,
    Record,
    Spread,
    bounded,
    parse_margin,
    seen,
    unknown,
)
from graphmem.devices import custom_device, device_named
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import UsageError
from graphmem.estimate import LEVELS, Estimate, Fit, Peak
from graphmem.replay import Replay, replay
from graphmem.reports import certainty
from graphmem.runtimes.base import Runs, within_card
from graphmem.trace import Category, Trace, TraceBuilder, from_json, to_json
from graphmem.units import GIB, MIB
from tests import places

SHARES = st.floats(0, 1)
OFFSETS = st.integers(-(1 << 40), 1 << 40)
SPREADS = st.one_of(
    st.just(EXACT),
    st.builds(bounded, st.integers(-(1 << 40), 0), st.integers(0, 1 << 40)),
    st.lists(OFFSETS, max_size=30).map(seen),
)


def _cause(name: str, spread: Spread) -> Cause:
    return Cause(name, "bounds", "a test", dict.fromkeys(TRACE_LEVELS, spread))


DOUBTS = st.lists(SPREADS, max_size=4).map(
    lambda spreads: Doubts(tuple(_cause(f"cause {number}", spread) for number, spread in enumerate(spreads)))
)


# --- one spread -------------------------------------------------------------------------------------------------------


@given(SPREADS, SHARES, SHARES)
def test_a_larger_share_never_asks_for_less(spread: Spread, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert spread.at(low) <= spread.at(high)


@given(SPREADS, SHARES)
def test_every_share_lies_between_the_ends_and_the_figure_too(spread: Spread, share: float) -> None:
    least, most = spread.least, spread.most
    assert least is not None
    assert most is not None
    assert least <= spread.at(share) <= most
    assert least <= 0 <= most
    assert (spread.at(0.0), spread.at(1.0)) == (least, most)


def test_what_was_seen_stands_at_its_expected_share() -> None:
    spread = seen([30, -10, 0, 0])
    assert [spread.at(rank / 5) for rank in range(1, 5)] == [-10, 0, 0, 30]
    assert (spread.least, spread.most) == (-10, 30)
    assert seen([]) == seen([0, 0]) == EXACT
    assert seen([5]).least == 0, "what was said is always inside"


def test_bounds_alone_are_as_likely_above_as_below() -> None:
    spread = bounded(-100, 40)
    assert [spread.at(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [-100, -50, 0, 20, 40]


# --- together ---------------------------------------------------------------------------------------------------------


@given(DOUBTS, SPREADS, SHARES)
def test_one_more_cause_never_narrows_the_interval(doubts: Doubts, spread: Spread, share: float) -> None:
    more = Doubts((*doubts.causes, _cause("one more", spread)))
    for level in LEVELS:
        before, after = (doubts.least(level), doubts.most(level)), (more.least(level), more.most(level))
        assert before[0] is not None
        assert before[1] is not None
        assert after[0] is not None
        assert after[1] is not None
        assert after[0] <= before[0] <= 0 <= before[1] <= after[1]
        assert after[0] <= more.at(level, share) <= after[1]
        assert more.at(level, share) == doubts.at(level, share) + spread.at(share)


def test_what_nothing_bounds_leaves_the_sum_without_a_bound() -> None:
    doubts = Doubts((_cause("known", bounded(-5, 5)), unknown("operators not checked", "a test")))
    assert (doubts.least("reserved"), doubts.most("reserved")) == (-5, None)
    assert doubts.at("reserved", 1.0) == 5
    both = Doubts((unknown("values", "a test", below=True),))
    assert (both.least("device"), both.most("device")) == (None, None)


# --- margins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "share"), [("p50", 0.5), ("p99", 0.99), ("P99.9", 0.999), ("p100", 1.0)])
def test_a_margin_is_a_share(text: str, share: float) -> None:
    assert parse_margin(text) == pytest.approx(share)
    assert Question(None, margin=text).margin_share == pytest.approx(share)


@pytest.mark.parametrize("text", ["99", "p", "p49", "p101", "p9", "p99%", "-p99", "p99.99999", "pnan", "", "p-1"])
def test_another_margin_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(UsageError, match="p50 to p100"):
        Question(None, margin=text)


# --- the verdict ------------------------------------------------------------------------------------------------------


def _run(size: int) -> tuple[Trace, Replay]:
    builder = TraceBuilder("a run")
    builder.alloc(size, builder.operator("aten.mm", phase=builder.phase(1, "forward")), Category.ACTIVATION)
    trace = builder.build()
    return trace, replay(trace, PyTorchCachingAllocator(None))


def _chance(trace: Trace, capacity: int, context: int, doubts: Doubts) -> float | None:
    question = Question(None, device=replace(custom_device(capacity), context_bytes=context))

    def run(size: int) -> Runs:
        return within_card(trace, PyTorchCachingAllocator, holding(question.setting, size).device)

    return probability(trace, run(context), doubts, run, question.setting)


@given(DOUBTS, st.integers(700 * MIB, 3 * GIB), st.integers(0, GIB))
def test_more_capacity_never_makes_it_less_likely(doubts: Doubts, capacity: int, more: int) -> None:
    trace, _ = _run(GIB)
    small, large = (_chance(trace, size, 512 * MIB, doubts) for size in (capacity, capacity + more))
    assert small is not None
    assert large is not None
    assert small <= large


@given(DOUBTS, st.integers(700 * MIB, 3 * GIB), st.integers(50, 100), st.integers(50, 100))
def test_a_larger_margin_never_passes_where_a_smaller_does_not(
    doubts: Doubts, capacity: int, first: int, second: int
) -> None:
    trace, main = _run(GIB)
    chance = _chance(trace, capacity, 512 * MIB, doubts)
    fits = main.peak_reserved_bytes + 512 * MIB <= capacity
    low, high = (
        Fit("a card", capacity, 0, 0, fits, probability=chance, margin=share / 100) for share in sorted((first, second))
    )
    assert low.passes or not high.passes


def test_the_verdict_names_the_share_of_runs_that_fit() -> None:
    trace, main = _run(GIB)
    doubts = Doubts((_cause("context", bounded(-100 * MIB, 100 * MIB)),))
    capacity = main.peak_reserved_bytes + 512 * MIB + 50 * MIB
    chance = _chance(trace, capacity, 512 * MIB, doubts)
    assert chance == pytest.approx(0.75, abs=1 / 256)
    fit = Fit("a card", capacity, 0, 50 * MIB, True, probability=chance)
    assert (fit.verdict, fit.chance, fit.passes) == ("likely", "75 %", True)
    asked = {share: replace(fit, margin=share).verdict for share in (0.5, 0.7, 0.9, 1.0)}
    assert asked == {0.5: "yes", 0.7: "yes", 0.9: "likely", 1.0: "likely"}
    assert not replace(fit, margin=0.9).passes


@pytest.mark.parametrize(
    ("cause", "capacity", "fits", "verdict"),
    [
        (unknown("operators", "a test"), 80 * GIB, True, "likely"),
        (unknown("operators", "a test"), GIB, False, "no"),
        (unknown("values", "a test", below=True), GIB, False, "likely not"),
    ],
)
def test_what_nothing_bounds_is_never_sure_where_it_may_decide(
    cause: Cause, capacity: int, fits: bool, verdict: str
) -> None:
    trace, _ = _run(GIB)
    chance = _chance(trace, capacity, 512 * MIB, Doubts((cause,)))
    fit = Fit("a card", capacity, 0, 0, fits, probability=chance, margin=0.5)
    assert (fit.verdict, fit.chance) == (verdict, "")
    assert not fit.passes


@pytest.mark.parametrize(("fits", "chance", "verdict", "words"), [
    (True, 0.01, "likely not", "99 %"), (True, 0.5, "likely", "50 %"), (False, 0.6, "likely", "60 %"),
    (False, 0.48, "likely not", "52 %"), (True, None, "likely", ""), (False, None, "likely not", ""),
])  # fmt: skip
def test_what_is_likely_goes_by_the_probability(fits: bool, chance: float | None, verdict: str, words: str) -> None:
    fit = Fit("a card", GIB, GIB, 0, fits, probability=chance)
    assert (fit.verdict, fit.chance) == (verdict, words)
    assert fit.passes == (verdict == "likely")


def test_a_share_is_counted_where_more_room_does_not_always_help() -> None:
    assert _bounded_share(lambda share: 0.25 < share < 0.75, undisturbed=True) == 0.5
    assert _bounded_share(lambda share: 0.25 < share < 0.75, undisturbed=False) == 0.0
    assert _bounded_share(lambda share: share < 0.75, undisturbed=True) == pytest.approx(0.75, abs=1 / 256)


@pytest.mark.parametrize(("capacity", "verdict"), [(52 * GIB, "yes"), (50 * GIB, "likely")])
def test_what_would_have_to_multiply_the_peak_does_not_decide_where_there_is_room(capacity: int, verdict: str) -> None:
    trace, _ = _run(GIB)
    weighed = replace(unknown("operators", "a test", below=True), times=MOST_TIMES)
    chance = _chance(trace, capacity, 512 * MIB, Doubts((weighed,)))
    assert Fit("a card", capacity, 0, 0, True, probability=chance).verdict == verdict
    both = Doubts((weighed, unknown("values", "a test")))
    assert _chance(trace, capacity, 512 * MIB, both) is None


def test_what_fits_though_its_range_exceeds_the_card_says_how() -> None:
    """A T4's 14.57 GiB beside 11.42 to 15.49 GiB, and FITS."""
    estimate = replay_trace(_run(GIB)[0], device="A100-40GB", alloc_conf="", torch_version="2.13")
    fit = Fit("a card", estimate.device + 100 * MIB, estimate.device, 100 * MIB, True, probability=1.0)
    doubts = [
        Doubts((_cause(name, bounded(0, most)),)) for name, most in (("a", GIB), ("cuDNN's plans", GIB), ("a", MIB))
    ]
    said = [certainty.sentence(replace(estimate, fit=fit, doubts=one)) for one in doubts]
    assert "if the card had as much (within 1.5" in said[0]
    assert "it fits even then: cached segments are given back)" in said[0]
    assert "it fits even then: cuDNN takes plans with smaller workspaces, or cached segments are given back)" in said[1]
    assert "limit" not in said[2]


def test_a_later_plan_may_make_it_fit_where_the_first_does_not() -> None:
    """What is live at once with the first plan says nothing of a call that can do without a workspace."""
    builder = TraceBuilder("a run")
    operator = builder.operator("aten.mm", phase=builder.phase(1, "forward"))
    builder.alloc(GIB, operator)
    workspace = builder.alloc_for_call("a shape", (GIB, 0), operator)
    builder.free(workspace, operator)
    trace = builder.build()
    context = Doubts((_cause("context", bounded(-400 * MIB, 100 * MIB)),))
    capacity = GIB + 300 * MIB
    chance = _chance(trace, capacity, 512 * MIB, context)
    assert chance is not None
    assert 0 < chance < 0.5


# --- the causes of a trace --------------------------------------------------------------------------------------------

PEAK = Peak(GIB, GIB, 2 * GIB, 3 * GIB)
CARD = device_named("A100-40GB")


def _estimate(plans: int = 0) -> Estimate:
    builder = TraceBuilder("a run", predicted_plans=plans)
    builder.alloc(GIB, builder.operator("aten.convolution", phase=builder.phase(1, "forward")), Category.ACTIVATION)
    return replay_trace(from_json(to_json(builder.build())), device="A100-40GB", alloc_conf="", torch_version="2.13")


def _unchanged(_: Trace) -> Peak:
    return PEAK


def _with_workspace(label: str, timing: int = 0) -> Estimate:
    """A gibibyte, and beside it 10 MiB of this label."""
    builder = TraceBuilder("a run")
    operator = builder.operator("aten.mm", phase=builder.phase(1, "forward"))
    builder.alloc(GIB, operator)
    for size, name in ((timing, "cuDNN workspace for timing plans"), (10 * MIB, label)):
        if size:
            builder.free(builder.alloc(size, operator, label=name), operator)
    return replay_trace(builder.build(), device="A100-40GB", alloc_conf="", torch_version="2.13")


def test_a_work_area_of_cufft_may_take_eight_times_as_much() -> None:
    found = _with_workspace("cuFFT work area (estimate)")
    assert found.interval("allocated") == (GIB + 10 * MIB, GIB + 80 * MIB)
    assert found.interval("reserved") == (found.reserved, GIB + 80 * MIB)
    assert [cause.name for cause in found.doubts.about("reserved")] == ["cuFFT's work areas"]


def test_the_fastest_plan_lies_between_none_and_the_largest_that_was_timed() -> None:
    found = _with_workspace("cuDNN workspace (estimate)", timing=50 * MIB)
    assert found.interval("allocated") == (GIB + 50 * MIB, GIB + 50 * MIB), "the timing took as much before"
    assert not found.doubts.about("reserved")
    alone = _with_workspace("cuDNN workspace (estimate)")
    assert not alone.doubts.about("reserved"), "which is told by predicted_plans"


def test_a_known_step_is_exact_and_its_process_as_its_context() -> None:
    estimate = _estimate()
    for level in ("requested", "allocated", "reserved"):
        said = getattr(estimate, level)
        assert estimate.interval(level) == (said, said)
        assert estimate.at_margin(level, "p99") == said
    assert estimate.card is not None
    context = estimate.card.context
    assert estimate.interval("device") == (
        estimate.reserved + sum(figure.least_bytes for figure in context),
        estimate.reserved + sum(figure.most_bytes for figure in context),
    )


def test_predicted_plans_are_off_as_networks_were() -> None:
    estimate = _estimate(plans=3)
    (cause, *context) = estimate.doubts.causes
    assert (cause.name, cause.basis) == ("cuDNN's plans", "measured")
    assert cause.count >= 500
    assert cause.inside == pytest.approx(0.95)
    assert all(other.spreads.keys() == {"device"} for other in context)
    least, most = estimate.interval("reserved")
    assert least is not None
    assert most is not None
    assert least < estimate.reserved < most


def test_what_changed_a_reserved_peak_changes_it_by_whole_segments() -> None:
    for size in (1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1):
        assert causes._in_segments(size) == -causes._in_segments(-size) >= size
        assert causes._in_segments(size) - size < 2 * MIB
    assert causes._in_segments(0.0) == 0


def test_a_predicted_plan_may_need_no_workspace() -> None:
    """Which is less than networks ever changed by where the workspace is half of the peak."""
    builder = TraceBuilder("a run", predicted_plans=1)
    operator = builder.operator("aten.convolution", phase=builder.phase(1, "forward"))
    builder.alloc(GIB, operator)
    builder.free(builder.alloc(GIB, operator, label="cuDNN workspace (estimate)"), operator)
    estimate = replay_trace(builder.build(), device="A100-40GB", alloc_conf="", torch_version="2.13")
    assert (estimate.allocated, estimate.interval("allocated")[0]) == (2 * GIB, GIB)
    assert estimate.interval("reserved")[0] == GIB


@pytest.mark.parametrize(
    "name", ["T4-16GB", "A100-40GB", "RTX-3090", "RTX-4090", "H200-141GB", "B200", "RTX-5090", "MI300X"]
)
def test_predicted_plans_are_a_doubt_on_every_card(name: str) -> None:
    """Of one that is not NVIDIA's they are those of the card it is taken for."""
    trace = TraceBuilder("a run", predicted_plans=1).build()
    (cause,) = causes.causes_of_trace(trace, PEAK, [], _unchanged, device_named(name))
    allocated, reserved = cause.spread("allocated"), cause.spread("reserved")
    assert -GIB < (reserved.least or 0) < (allocated.least or 0) <= 0 <= (allocated.most or 0) < (reserved.most or 0)
    assert (reserved.most or 0) < 2 * GIB


def test_a_trace_with_more_than_bytes_can_hold_is_refused() -> None:
    with pytest.raises(Exception, match="predicted_plans"):
        TraceBuilder("a run", predicted_plans=-1).build()


@pytest.mark.parametrize(
    ("diagnostic", "least", "most"),
    [
        (Code.NOT_CHECKED.about(operator="my.kernel.default"), 0, None),
        (Code.NOT_MODELLED.about(operator="aten.geqrf.default", memory="a workspace"), 0, None),
        (Code.ESTIMATED.about(operator="aten._fft_c2c.default", memory="a work area"), 0, 0),
        (Code.ALL_SELECTED.about(), None, 0),
        (Code.SHARE_SELECTED.about(share=0.5), None, None),
        (Code.ONLY_LOGGED.about(), 0, 0),
        (Code.FINITE.about(), 0, 0),
        (Code.OPTIONAL_MISSING.about(importer="timm", package="apex"), 0, 0),
        (Code.TRITON_MISSING.about(importer="a library"), None, None),
        (Diagnostic(Code.UNKNOWN, "something that nobody has sorted yet"), None, None),
        (Diagnostic(Code.NOTE, "something to know"), 0, 0),
    ],
)
def test_the_effect_of_a_diagnostic_is_a_cause(diagnostic: Diagnostic, least: int | None, most: int | None) -> None:
    trace, _ = _run(GIB)
    doubts = Doubts(tuple(causes.causes_of_trace(trace, PEAK, [diagnostic], _unchanged, CARD)))
    assert (doubts.least("allocated"), doubts.most("allocated")) == (least, most)


def test_a_value_that_decides_has_no_bound() -> None:
    trace, _ = _run(GIB)
    (cause,) = causes.causes_of_trace(trace, PEAK, [Code.NUMBER.about(place="train.py:3")], _unchanged, CARD)
    assert cause.name == "values assumed"
    assert (cause.spread("device").least, cause.spread("device").most) == (None, None)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_the_recorded_versions_are_those_of_the_goldens() -> None:
    assert versions.RECORDED == places.RECORDED
    assert max(versions.RECORDED) == versions.NEWEST
    assert min(versions.RECORDED) > versions.OLDEST


@given(st.integers(4, 15))
def test_only_versions_between_recorded_ones_have_neighbours(minor: int) -> None:
    version = (2, minor)
    between = causes.neighbours(version)
    assert bool(between) == (version not in versions.RECORDED)
    if between:
        assert between[0] < version < between[1]


def test_before_the_oldest_recorded_version_there_is_the_next_one_alone() -> None:
    assert causes.neighbours((1, 8)) == (min(versions.RECORDED),)


def test_an_unrecorded_version_lies_between_its_neighbours() -> None:
    peaks = {(2, 4): replace(PEAK, allocated_bytes=GIB + 5), (2, 6): replace(PEAK, reserved_bytes=GIB)}
    cause = causes.cause_of_version((2, 5), PEAK, lambda version: peaks.get(version))
    assert cause is not None
    assert (cause.spread("allocated").least, cause.spread("allocated").most) == (0, 5)
    assert (cause.spread("device").least, cause.spread("device").most) == (-GIB, 0)
    assert causes.cause_of_version((2, 5), PEAK, lambda version: PEAK) is None
    missing = causes.cause_of_version((2, 5), PEAK, lambda version: None)
    assert missing is not None
    assert missing.basis == "unknown"


def test_a_newer_version_may_change_as_versions_did() -> None:
    assert causes.cause_of_version(versions.NEWEST, PEAK, lambda version: None) is None
    cause = causes.cause_of_version((2, 99), PEAK, lambda version: None)
    assert cause is not None
    assert cause.basis == "measured"
    least = cause.spread("reserved").least
    assert least is not None
    assert -2 * GIB < least < 0


# --- in words ---------------------------------------------------------------------------------------------------------


def test_every_report_says_how_sure() -> None:
    estimate = _estimate(plans=3)
    for shown in (estimate.report(details=True), estimate.report("html")):
        plain = " ".join(shown.replace("&#x27;", "'").split())
        assert "How sure: allocated" in plain
        assert "cuDNN's plans" in plain
        assert "are expected inside" in plain
    document = estimate.to_dict()["certainty"]
    assert document["levels"].keys() == set(LEVELS)
    assert document["causes"][0]["name"] == "cuDNN's plans"
    assert document["causes"][0]["off_by"]["reserved"]["most_bytes"] > 0


@given(DOUBTS)
def test_the_interval_in_words_is_exact_only_where_it_is(doubts: Doubts) -> None:
    assume(doubts.causes)
    estimate = replace(ESTIMATE, doubts=doubts)
    least, most = estimate.interval("reserved")
    assert (certainty.interval(estimate, "reserved") == "exact") == (least == most)


ESTIMATE = _estimate()


# --- records ----------------------------------------------------------------------------------------------------------

RECORD = Record((0.0, 0.0, 0.0, 0.2, 3.0, -0.1))


def test_a_record_gives_a_chance_that_never_is_nought() -> None:
    assert (RECORD.chance(1e-9), RECORD.chance(0.5), RECORD.chance(10)) == (3 / 8, 2 / 8, 1 / 8)
    assert (RECORD.chance(-1e-9), RECORD.chance(-0.5)) == (2 / 8, 1 / 8)
    assert str(RECORD) == "of 6 recorded programs with this cause the peak moved in 3, by -10.0 % to +300.0 %"
    assert str(Record((0.0,))) == "of 1 recorded programs with this cause the peak moved in 0"


@pytest.mark.parametrize(("capacity", "chance"), [(52 * GIB, 1.0), (50 * GIB, 7 / 8), (2 * GIB, 6 / 8)])
def test_what_nothing_bounds_is_as_likely_as_recorded_programs_show(capacity: int, chance: float) -> None:
    trace, _ = _run(GIB)
    recorded = replace(unknown("operators", "a test"), times=MOST_TIMES, record=RECORD)
    found = _chance(trace, capacity, 512 * MIB, Doubts((recorded,)))
    assert found == chance
    assert Fit("a card", capacity, 0, 0, True, probability=found).verdict == ("yes" if chance == 1 else "likely")
    both = Doubts((recorded, unknown("values", "a test")))
    assert _chance(trace, capacity, 512 * MIB, both) is None, "one without a record"


def test_what_may_be_less_makes_it_fit_as_often_as_recorded_programs_show() -> None:
    trace, _ = _run(GIB)
    spread = dict.fromkeys(LEVELS, Spread(below=True))
    recorded = Cause("most", "unknown", "a test", spread, record=RECORD)
    assert _chance(trace, GIB, 512 * MIB, Doubts((recorded,))) == 1 / 8


def test_plans_of_another_cudnn_are_in_doubt() -> None:
    assert causes.cause_of_cudnn("9.20.0", (2, 13), PEAK, CARD) is None
    assert causes.cause_of_cudnn("", (2, 6), PEAK, CARD) is None
    cause = causes.cause_of_cudnn("9.20.0", (2, 6), PEAK, CARD)
    assert cause is not None
    assert "9.1.0" in cause.source
    assert cause.spread("reserved") == causes.cause_of_cudnn("9.1.0", (2, 13), PEAK, CARD).spread("reserved")  # type: ignore[union-attr]


@pytest.mark.parametrize("attention", ["aten._scaled_dot_product_flash_attention", "aten._softmax.default"])
def test_a_language_model_on_a_real_card_is_as_sure_as_published_ones_were(attention: str) -> None:
    builder = TraceBuilder("a run")
    for name in ("aten.embedding.default", "aten.mm.default"):
        builder.alloc(GIB, builder.operator(name, phase=builder.phase(1, "forward")))
    assert causes.cause_of_real_card(builder.build(), PEAK) is None, "no attention"
    builder.alloc(GIB, builder.operator(attention, phase=builder.phase(1, "forward")))
    cause = causes.cause_of_real_card(builder.build(), PEAK)
    assert cause is not None
    assert cause.basis == "measured"
    most = cause.spread("reserved").most
    assert most is not None
    assert 0.003 * PEAK.reserved_bytes < most < 0.01 * PEAK.reserved_bytes


def test_the_largest_doubt_is_named_with_what_removes_it() -> None:
    small = _cause("context", bounded(-MIB, MIB))
    wide = replace(_cause("plans", bounded(-GIB, GIB)), remedy="--cudnn PATH asks a cuDNN")
    open_there = replace(unknown("values", "a test"), record=RECORD)
    assert Doubts((small, wide)).largest == wide
    assert Doubts((small, wide, open_there)).largest == open_there
    said = " ".join(replace(_estimate(), doubts=Doubts((small, wide))).report().split())
    assert "the largest doubt: plans, +-1.00 GiB (--cudnn PATH asks a cuDNN)." in said
    said = " ".join(replace(_estimate(), doubts=Doubts((small, open_there))).report().split())
    assert "the peak moved in 3, by -10.0 % to +300.0 %" in said
