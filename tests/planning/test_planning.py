"""Fit, sweep and advice: every figure is one that an analysis of its own gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.answering import stages
from graphmem.answering.question import Question
from graphmem.answering.sized import SizedRuns
from graphmem.errors import SourceError, UsageError
from graphmem.estimate import Estimate, Fit
from graphmem.planning.advise import Advice, Advised, _up_to, _without_allocator
from graphmem.planning.fit import fit
from graphmem.planning.sweep import Row, Rows
from graphmem.reports.document import Choices, Curves, HeatMap, Table
from graphmem.training import Training
from graphmem.units import GIB, MIB, format_bytes
from tests.support.estimates import training_estimate
from tests.support.examples import examples


@pytest.fixture
def needing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], list[int]]:
    """Stands for the analysis: a batch needs what a function says, of a card of 1 GiB. Gives the batches asked for."""

    def stand_in(need: Callable[[int], int]) -> list[int]:
        asked: list[int] = []

        def answer(question: Question, *_: Any) -> Estimate:
            assert question.batch is not None
            asked.append(question.batch)
            device = need(question.batch)
            estimate = training_estimate()
            peak = replace(estimate.peak, device_bytes=device)
            fits = device <= GIB
            fit = Fit("card", GIB, device, GIB - device, fits, probability=float(fits))
            return replace(estimate, peak=peak, fit=fit)

        monkeypatch.setattr(stages, "estimate_of", answer)
        monkeypatch.setattr(SizedRuns, "capture", lambda *_: None)
        return asked

    return stand_in


def test_a_search_counts_down_to_its_end(needing: Callable[[Callable[[int], int]], list[int]]) -> None:
    asked = needing(lambda batch: -(-batch * 3 * MIB // (64 * MIB)) * 64 * MIB)

    class Heard:
        counts: ClassVar[list[tuple[int, int]]] = []

        def __call__(self, stage: str) -> None: ...

        def count(self, done: int, total: int) -> None:
            self.counts.append((done, total))

    found = fit("model", device="T4", at_most=4096, say=Heard())
    done, total = zip(*Heard.counts, strict=True)
    assert found.value == 341
    assert list(done) == sorted(done)
    assert done[-1] <= len(asked)
    assert all(one <= whole for one, whole in Heard.counts)
    assert done[-1] == total[-1]


@settings(max_examples=examples(60))
@given(base=st.integers(0, GIB - 1), slope=st.integers(1, GIB), steps=st.sampled_from([1, 64 * MIB]))
def test_the_largest_size_fits_and_the_next_does_not(base: int, slope: int, steps: int) -> None:
    def need(batch: int) -> int:
        return -(-(base + batch * slope) // steps) * steps  # some allocators grow in steps

    with pytest.MonkeyPatch.context() as patch:
        asked: list[int] = needing.__wrapped__(patch)(need)  # type: ignore[attr-defined]
        found = fit("model", at_most=1 << 40)
    assert found.value == 0 or need(found.value) <= GIB
    assert need(found.above_value) > GIB
    assert found.above_value == found.value + 1
    assert len(asked) == len(set(asked)) <= 90


def test_a_linear_need_is_found_in_few_analyses(needing: Any) -> None:
    asked = needing(lambda batch: 100 * MIB + batch * MIB)
    assert fit("model").value == 924
    assert len(asked) <= 6


def test_only_multiples_up_to_the_bound_are_tried(needing: Any) -> None:
    asked = needing(lambda batch: batch * MIB)
    assert fit("model", multiple_of=128).value == 1024
    assert all(batch % 128 == 0 for batch in asked)
    needing(lambda batch: 1)
    bounded = fit("model", multiple_of=8, at_most=100)
    assert (bounded.value, bounded.above, bounded.stopped_by) == (96, None, "at most 96 was asked for")


def test_room_that_must_stay_free_is_left(needing: Any) -> None:
    needing(lambda batch: batch * MIB)
    assert fit("model", spare_bytes=24 * MIB).value == 1000


def test_a_size_that_cannot_be_analysed_ends_the_search_with_its_reason(
    needing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing(lambda batch: batch)
    small = stages.estimate_of

    def refusing(question: Question, *others: Any) -> Estimate:
        if question.batch is not None and question.batch > 50:
            raise SourceError("the table of positions ends")
        return small(question, *others)

    monkeypatch.setattr(stages, "estimate_of", refusing)
    found = fit("model")
    assert (found.value, found.above) == (50, None)
    assert "batch 51 cannot be analysed: the table of positions ends" in found.stopped_by


def needs_two_samples(monkeypatch: pytest.MonkeyPatch, at_least: int) -> None:
    anything = stages.estimate_of

    def refusing(question: Question, *others: Any) -> Estimate:
        if question.batch is not None and question.batch < at_least:
            raise SourceError("expected more than 1 value per channel when training")
        return anything(question, *others)

    monkeypatch.setattr(stages, "estimate_of", refusing)


def test_a_model_that_takes_no_single_sample_is_searched_from_two_on(
    needing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing(lambda batch: batch * MIB)
    needs_two_samples(monkeypatch, at_least=2)
    assert fit("model").value == 1024
    needing(lambda batch: batch * GIB)
    needs_two_samples(monkeypatch, at_least=2)
    nothing = fit("model")
    assert (nothing.value, nothing.estimate, nothing.above_value) == (0, None, 2)


def test_a_model_that_cannot_be_analysed_at_all_fails_with_its_first_error(
    needing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing(lambda batch: batch)
    needs_two_samples(monkeypatch, at_least=1000)
    with pytest.raises(SourceError, match="more than 1 value"):
        fit("model")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"multiple_of": 0}, "multiple_of"),
        ({"at_most": 3, "multiple_of": 4}, "no multiple"),
        ({"batch": 4}, "searched"),
        ({"size": "dtype"}, "cannot search"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fit("model", **wrong)


# --- with real analyses -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    nn = pytest.importorskip("torch").nn
    layers = [nn.Linear(256, 256) for _ in range(4)]
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def example() -> Any:
    return pytest.importorskip("torch").zeros(4, 256)


@pytest.fixture(scope="module")
def advised(model: Any, example: Any) -> Advised:
    return graphmem.advise(model, example, batch=4096, device="T4", steps=True)


def test_the_figures_of_a_sweep_are_those_of_analyses(model: Any, example: Any) -> None:
    vary: dict[str, list[Any]] = {"batch": [2, 64], "optimizer": ["sgd", "adamw", "nope"]}
    rows = graphmem.sweep(model, example, vary=vary, device="T4")
    assert [tuple(row.settings.values()) for row in rows] == [(b, o) for b in (2, 64) for o in vary["optimizer"]]
    one = graphmem.analyze(model, example, batch=64, training=Training("sgd"), device="T4")
    assert rows[3].estimate is not None
    assert rows[3].estimate.to_dict() == one.without_events().to_dict()
    assert rows[5].estimate is None
    assert "unknown optimizer 'nope'" in rows[5].error
    json.dumps([row.to_dict() for row in rows])


def test_a_sweep_in_which_nothing_works_is_an_error(model: Any, example: Any) -> None:
    with pytest.raises(UsageError, match="nothing is called 'colour'"):
        graphmem.sweep(model, example, vary={"colour": [1, 2]})
    with pytest.raises(UsageError, match="list of at least one value"):
        graphmem.sweep(model, example, vary={"batch": []})


def test_advice_saves_what_it_says(model: Any, example: Any, advised: Advised) -> None:
    base = graphmem.analyze(model, example, batch=4096, device="T4")
    assert advised.base.device == base.device
    by_option = {one.options: one for one in advised.advice}
    half = by_option["--amp fp16"]  # bf16 is emulated there
    again = graphmem.analyze(model, example, batch=4096, device="T4", training=Training(amp="fp16"))
    assert half.estimate is not None
    assert half.saved_bytes == base.device - again.device
    savings = [one.saved_bytes for one in advised.advice if one.estimate is not None]
    assert savings == sorted(savings, reverse=True)
    together = next(one for one in advised.advice if "together" in one.change)
    assert not ("--amp" in together.options and "--dtype" in together.options)
    json.dumps(advised.to_dict())


def test_advice_goes_step_by_step_to_all_of_it_together(advised: Advised) -> None:
    first, *_, last = advised.steps
    single = max((one for one in advised.advice if "together" not in one.change), key=lambda one: one.saved_bytes)
    assert first == single
    assert last.estimate == next(one.estimate for one in advised.advice if "together" in one.change)
    for before, after in pairwise(advised.steps):
        assert after.options.startswith(f"{before.options} ")
        assert before.settings.items() <= after.settings.items()
    best = max((*advised.advice, *advised.steps), key=lambda one: one.saved_bytes)
    assert f"down to {format_bytes(advised.base.device - best.saved_bytes)}" in " ".join(str(advised).split())


@pytest.mark.parametrize(("with_it", "kept"), [(5, False), (7, True)])
def test_an_allocator_that_costs_beside_other_changes_is_left_out(with_it: int, kept: bool) -> None:
    """Bytes saved: 6 by the two others, and with the allocator's change, too, 5 or 7."""
    changes = [Advice(name, f"--{name}", {name: 1}, None) for name in ("batch", "alloc_conf", "loop")]

    def tries(change: Advice) -> Advice:
        return replace(change, saved_bytes=with_it if "alloc_conf" in change.settings else 6)

    found = _without_allocator(changes, tries(_up_to(changes, 3)), tries)
    assert found is None if kept else found is not None and found[1].options == "--batch --loop"


def test_advice_that_cannot_be_followed_says_why(advised: Advised) -> None:
    checkpointing = next(one for one in advised.advice if one.options == "--checkpoint-activations")
    assert checkpointing.estimate is None
    assert "no repeated blocks" in checkpointing.reason


def test_a_page_of_a_sweep_draws_what_is_a_number_and_has_all_cases_to_choose() -> None:
    settings = [{"batch": batch, "amp": amp} for amp in ("bf16", None) for batch in (4, 1, 2)]
    rows = Rows([Row(one, training_estimate()) for one in settings])
    parts = [block for one in rows.document().sections for block in one.blocks]
    (curves,) = (block for block in parts if isinstance(block, Curves))
    assert curves.over == ([1.0, 2.0, 4.0], "batch")
    assert [one.name for one in curves.curves] == ["bf16", "off"]
    (choices,) = (block for block in parts if isinstance(block, Choices))
    assert choices.axes == [("batch", ["1", "2", "4"]), ("amp", ["bf16", "off"])]
    assert len(choices.cases) == 6
    (found,) = (block for block in parts if isinstance(block, HeatMap))
    assert (found.down, found.across) == (("amp", ["bf16", "off"]), ("batch", ["1", "2", "4"]))
    assert {cell.size for cell in found.cells.values()} == {training_estimate().device}
    (table,) = (block for block in parts if isinstance(block, Table))
    assert [column.unit for column in table.columns[:2]] == ["figure", ""]
    refused = Rows([*rows[:-1], Row.failed(settings[-1], UsageError("no such type"))])
    (found,) = (block for one in refused.document().sections for block in one.blocks if isinstance(block, HeatMap))
    assert found.cells["off", "2"].size is None
    assert 'batch 2: no such type">-</td>' in refused.report("html")
    some = Rows([Row(one, training_estimate()) for one in settings[:-1]])  # a curve would have a hole
    assert not any(isinstance(block, Curves) for one in some.document().sections for block in one.blocks)


def test_a_figure_above_the_card_that_fits_says_why() -> None:
    fit = Fit("card", GIB, GIB - MIB, MIB, True, needs_cache_flush=True, unlimited_bytes=2 * GIB, probability=1.0)
    estimate = replace(training_estimate(), fit=fit)
    swept = str(Rows([Row({"batch": 1}, estimate)]))
    assert "fits (cached segments given back) card" in swept
    advised = str(Advised(estimate, (Advice("half the batch", "--batch 1", {"batch": 1}, estimate, MIB),)))
    assert advised.count("fits (cached segments given back)") == 2
